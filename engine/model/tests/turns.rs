//! Passes of prompts and of decode steps at the same time. Alone in this program, because the turns
//! belong to the process.

use larder_model::{Chunk, KvPool, LayerHooks, LogitRows, Model, PageSlot};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Prompt,
    Step,
}

/// Records the layers of all passes, in the order in which they end.
struct Recorder<'a>(Pass, &'a Mutex<Vec<(Pass, usize)>>);

impl LayerHooks for Recorder<'_> {
    fn layer_done(&mut self, layer: usize, _batch: &[Chunk<'_>]) {
        self.1.lock().unwrap().push((self.0, layer));
    }
}

fn compute(model: &Model, pass: Pass, tokens: &[u32], layers: &Mutex<Vec<(Pass, usize)>>) {
    let pool = KvPool::new(model.geometry(16), tokens.len().div_ceil(16));
    let mut pages: Vec<PageSlot> = std::iter::from_fn(|| pool.allocate()).map(PageSlot::Open).collect();
    let chunk = Chunk { tokens, position: 0, pages: &mut pages, logits: LogitRows::Last };
    model.forward(&mut [chunk], &mut Recorder(pass, layers)).unwrap();
}

#[test]
fn decode_step_runs_whole_between_two_layers_of_a_prompt() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
    let model = Model::load(&folder).unwrap();
    let count = model.config().layers;
    let layers = Mutex::new(Vec::new());
    let has_overtaken = || {
        let layers = layers.lock().unwrap();
        layers.windows(2).any(|pair| matches!(pair, [(Pass::Prompt, last), (Pass::Step, 0)] if last + 1 < count))
    };
    let prompt: Vec<u32> = (1..400).collect();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let prompts = scope.spawn(|| {
            while !has_overtaken() && begin.elapsed() < Duration::from_secs(60) {
                compute(&model, Pass::Prompt, &prompt, &layers);
            }
        });
        while !prompts.is_finished() {
            compute(&model, Pass::Step, &[7], &layers);
            // Steps without a pause would take half of the time. This test needs no such race.
            std::thread::yield_now();
        }
    });
    assert!(has_overtaken(), "no step ran before the end of a prompt");
    let layers = layers.into_inner().unwrap();
    let starts = layers.iter().enumerate().filter(|(_, done)| **done == (Pass::Step, 0));
    for (start, _) in starts {
        let step: Vec<_> = (0..count).map(|layer| (Pass::Step, layer)).collect();
        assert_eq!(layers[start..start + count], step, "a prompt interrupted a step");
    }
}
