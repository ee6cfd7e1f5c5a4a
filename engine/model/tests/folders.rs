//! Hostile and incomplete model folders. The loader refuses each with an error that names the
//! fault.

use larder_model::{Chunk, ForwardError};
use larder_model::{KvPool, LoadError, LoadOptions, LogitRows, Model, PageSlot, WeightFormat};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// Copy of a golden model that a test can damage. Removed on drop.
struct ModelFolder(PathBuf);

impl ModelFolder {
    fn copy_of(name: &str) -> ModelFolder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("larder-model-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for entry in std::fs::read_dir(golden(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
        }
        ModelFolder(dir)
    }

    fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let path = self.0.join(file);
        let mut content = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut content);
        std::fs::write(path, serde_json::to_vec(&content).unwrap()).unwrap();
    }

    fn error(&self) -> String {
        Model::load(&self.0).expect_err("the folder is damaged").to_string()
    }
}

impl Drop for ModelFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const LLAMA: &str = "llama-gqa-untied-f32";

fn config_error(name: &str, changes: &[(&str, Value)]) -> String {
    let folder = ModelFolder::copy_of(name);
    folder.edit("config.json", |config| {
        for (field, value) in changes {
            config[*field] = value.clone();
        }
    });
    folder.error()
}

#[test]
fn error_names_the_missing_file() {
    assert!(matches!(Model::load(Path::new("/no/such/folder")), Err(LoadError::NoFolder(_))));
    for (file, expected) in
        [("config.json", "config.json"), ("model.safetensors", "neither model.safetensors nor model.safetensors.index")]
    {
        let folder = ModelFolder::copy_of(LLAMA);
        std::fs::remove_file(folder.0.join(file)).unwrap();
        assert!(folder.error().contains(expected), "{}", folder.error());
    }
    let folder = ModelFolder::copy_of("qwen3-sharded-f32");
    std::fs::remove_file(folder.0.join("model-00002-of-00004.safetensors")).unwrap();
    assert!(folder.error().contains("model-00002-of-00004.safetensors"), "{}", folder.error());
}

#[test]
fn error_names_the_unsupported_feature() {
    let cases: &[(&str, &str, Value, &[&str])] = &[
        (LLAMA, "architectures", json!(["MambaForCausalLM"]), &["MambaForCausalLM", "LlamaForCausalLM, Mistral"]),
        (LLAMA, "architectures", json!("x"), &["(none)"]),
        (LLAMA, "rope_parameters", json!({"rope_type": "yarn", "factor": 2.0}), &["yarn", "llama3"]),
        (LLAMA, "rope_parameters", json!({"rope_type": "llama3", "factor": 2.0}), &["low_freq_factor", "missing"]),
        (LLAMA, "rope_parameters", json!({"full_attention": {}, "rope_type": 3}), &["rope_type", "3"]),
        (LLAMA, "hidden_act", json!("gelu"), &["hidden_act", "gelu"]),
        (LLAMA, "quantization_config", json!({}), &["quantization_config"]),
        (LLAMA, "num_key_value_heads", json!(3), &["num_key_value_heads", "does not divide"]),
        (LLAMA, "num_attention_heads", json!(0), &["num_attention_heads", "0"]),
        (LLAMA, "num_hidden_layers", json!(u64::MAX), &["num_hidden_layers", "1024"]),
        (LLAMA, "head_dim", json!(15), &["head_dim", "odd"]),
        (LLAMA, "hidden_size", json!(-1), &["hidden_size", "-1"]),
        (LLAMA, "hidden_size", Value::Null, &["hidden_size", "missing"]),
        (LLAMA, "rms_norm_eps", json!(-1.0), &["rms_norm_eps"]),
        ("mistral-f32", "sliding_window", json!(64), &["sliding_window", "64"]),
        ("qwen2-f16", "layer_types", json!(["sliding_attention"]), &["layer_types", "sliding_attention"]),
    ];
    for (name, field, value, expected) in cases {
        let error = config_error(name, &[(field, value.clone())]);
        assert!(expected.iter().all(|text| error.contains(text)), "{field} = {value}: {error}");
    }
    let window = [("use_sliding_window", json!(true)), ("sliding_window", json!(8))];
    assert!(config_error("qwen3-sharded-f32", &window).contains("a window of 8 tokens"));
    // A window as long as the context has no effect.
    let folder = ModelFolder::copy_of("mistral-f32");
    folder.edit("config.json", |config| config["sliding_window"] = json!(256));
    Model::load(&folder.0).unwrap();
}

#[test]
fn error_names_the_wrong_tensor() {
    let error = config_error(LLAMA, &[("num_hidden_layers", json!(3))]);
    assert!(error.contains("tensor model.layers.2.input_layernorm.weight is missing"), "{error}");
    let error = config_error(LLAMA, &[("vocab_size", json!(321))]);
    assert!(error.contains("model.embed_tokens.weight has shape [320, 64]"), "{error}");
    assert!(error.contains("requires [321, 64]"), "{error}");
    let error = config_error("llama3-rope-tied-bf16", &[("tie_word_embeddings", json!(false))]);
    assert!(error.contains("lm_head.weight is missing"), "{error}");
    let error = config_error(LLAMA, &[("attention_bias", json!(true))]);
    assert!(error.contains("model.layers.0.self_attn.q_proj.bias is missing"), "{error}");
    // The same bytes under another element type.
    let folder = ModelFolder::copy_of(LLAMA);
    let path = folder.0.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(7).position(|w| w == b"\"F32\",\"").unwrap();
    bytes[at + 1..at + 4].copy_from_slice(b"I32");
    std::fs::write(&path, bytes).unwrap();
    assert!(folder.error().contains("holds I32; supported are F32, BF16 and F16"), "{}", folder.error());
}

#[test]
fn damaged_files_never_panic() {
    let whole = std::fs::read(golden(LLAMA).join("model.safetensors")).unwrap();
    let folder = ModelFolder::copy_of(LLAMA);
    let path = folder.0.join("model.safetensors");
    for len in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).unwrap();
        let error = folder.error();
        assert!(error.contains("model.safetensors"), "{len}: {error}");
    }
    // A changed byte of the header gives an error, or a model if the byte has no meaning (an unused
    // name, white space).
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in (0..header.min(3000)).step_by(13) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x15;
        std::fs::write(&path, &bytes).unwrap();
        let _ = Model::load(&folder.0);
    }
    for garbage in [&b""[..], b"{", b"[]", b"{\"architectures\": [[]]}", b"\xff\xfe", b"null"] {
        std::fs::write(folder.0.join("config.json"), garbage).unwrap();
        assert!(Model::load(&folder.0).is_err());
    }
}

#[test]
fn index_with_a_path_outside_the_folder_is_refused() {
    for name in ["../config.json", "/etc/passwd", "a/b", "", ".."] {
        let folder = ModelFolder::copy_of("qwen3-sharded-f32");
        folder.edit("model.safetensors.index.json", |index| index["weight_map"]["lm_head.weight"] = json!(name));
        assert!(folder.error().contains("not the name of a file in this folder"), "{name}: {}", folder.error());
    }
    let folder = ModelFolder::copy_of("qwen3-sharded-f32");
    folder.edit("model.safetensors.index.json", |index| index["weight_map"] = json!(3));
    assert!(folder.error().contains("weight_map"));
}

#[test]
fn fingerprint_changes_with_weights_and_configuration_only() {
    let original = Model::load(&golden("llama3-rope-tied-bf16")).unwrap().fingerprint();
    let folder = ModelFolder::copy_of("llama3-rope-tied-bf16");
    // The older shape of the same configuration.
    let older = golden("llama3-rope-tied-bf16-oldconfig").join("config.json");
    std::fs::copy(older, folder.0.join("config.json")).unwrap();
    assert_eq!(Model::load(&folder.0).unwrap().fingerprint(), original);
    // One bit of one weight.
    let path = folder.0.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert_ne!(Model::load(&folder.0).unwrap().fingerprint(), original);
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    // One number of the configuration.
    folder.edit("config.json", |config| config["rope_theta"] = json!(10001.0));
    assert_ne!(Model::load(&folder.0).unwrap().fingerprint(), original);
}

#[test]
fn memory_of_weights_and_workspaces_follows_from_the_configuration() {
    let model = Model::load(&golden(LLAMA)).unwrap();
    let config = model.config();
    let matrices = 2 * config.vocab * config.hidden;
    assert!(model.weight_bytes() >= (4 * matrices) as u64, "its embedding and its output, in f32");
    let options = LoadOptions { weights: WeightFormat::Q8, ..LoadOptions::default() };
    let rounded = Model::load_with(&golden(LLAMA), &options, &|_, _| ()).unwrap();
    assert!(rounded.weight_bytes() < model.weight_bytes());
    let more_logits = model.workspace_bytes(0, 11) - model.workspace_bytes(0, 1);
    assert_eq!(more_logits, (10 * 2 * 4 * config.vocab) as u64);
    let more_rows = model.workspace_bytes(11, 0) - model.workspace_bytes(1, 0);
    assert!(more_rows > (10 * 4 * 3 * (config.hidden + config.intermediate)) as u64);
    assert_eq!(model.workspace_bytes(usize::MAX, 1), u64::MAX);
}

#[test]
fn invalid_batch_leaves_all_pages_unchanged() {
    let model = Model::load(&golden(LLAMA)).unwrap();
    let geometry = model.geometry(16);
    geometry.validate().unwrap();
    let pool = KvPool::new(geometry, 8);
    let page = || {
        let mut page = pool.allocate().unwrap();
        page.fill_with(|| 7.0);
        page
    };
    let good = &[1, 2, 3][..];
    let attempt = |tokens: &[u32], position: usize, mut pages: Vec<PageSlot>| {
        let mut own = [PageSlot::Open(page())];
        let valid = Chunk { tokens: good, position: 0, pages: &mut own, logits: LogitRows::Last };
        let broken = Chunk { tokens, position, pages: &mut pages, logits: LogitRows::All };
        let error = model.forward(&mut [valid, broken], &mut ()).unwrap_err();
        let untouched = |slot: &PageSlot| slot.page().to_f32().iter().all(|&x| x == 7.0);
        assert!(own.iter().chain(&pages).all(untouched), "{error}");
        error
    };
    let open = || PageSlot::Open(page());
    let sealed = || open().seal();
    assert_eq!(attempt(&[], 0, vec![open()]), ForwardError::Empty { chunk: 1 });
    assert_eq!(attempt(&[320], 0, vec![open()]), ForwardError::Token { chunk: 1, token: 320, vocab: 320 });
    let context = ForwardError::Context { chunk: 1, end: 258, max_context: 256 };
    assert_eq!(attempt(&[1, 2, 3], 255, vec![open()]), context);
    assert!(matches!(attempt(good, usize::MAX, vec![open()]), ForwardError::Context { .. }));
    assert_eq!(attempt(good, 14, vec![open()]), ForwardError::Pages { chunk: 1, needed: 2, found: 1 });
    assert_eq!(attempt(good, 0, vec![]), ForwardError::Pages { chunk: 1, needed: 1, found: 0 });
    assert_eq!(attempt(good, 14, vec![open(), sealed()]), ForwardError::Sealed { chunk: 1, page: 1 });
    assert_eq!(attempt(good, 0, vec![sealed()]), ForwardError::Sealed { chunk: 1, page: 0 });
    let other = KvPool::new(model.geometry(8), 1);
    let mut foreign = other.allocate().unwrap();
    foreign.fill_with(|| 7.0);
    let error = attempt(good, 14, vec![open(), PageSlot::Open(foreign)]);
    assert_eq!(error, ForwardError::Geometry { chunk: 1, page: 1 });
    assert_eq!(model.forward(&mut [], &mut ()).unwrap(), Vec::<Vec<f32>>::new());
    assert_eq!(pool.free_pages(), 8);
}

#[test]
fn layer_hook_runs_after_the_pages_of_its_layer_are_written() {
    struct LayerRecorder(Vec<usize>);
    impl larder_model::LayerHooks for LayerRecorder {
        fn layer_done(&mut self, layer: usize, batch: &[Chunk<'_>]) {
            let page = batch[0].pages[0].page();
            let elements = page.to_f32();
            let layer_elements = elements.len() / page.geometry().layers as usize;
            let mut layers = elements.chunks(layer_elements);
            assert!(layers.by_ref().take(layer + 1).all(|l| l.iter().all(|x| !x.is_nan())), "written so far");
            assert!(layers.all(|l| l.iter().all(|x| x.is_nan())), "not written yet");
            self.0.push(layer);
        }
    }
    let model = Model::load(&golden(LLAMA)).unwrap();
    let pool = KvPool::new(model.geometry(4), 1);
    let mut page = pool.allocate().unwrap();
    page.fill_with(|| f32::NAN);
    let mut pages = [PageSlot::Open(page)];
    let chunk = Chunk { tokens: &[5, 6, 7, 8], position: 0, pages: &mut pages, logits: LogitRows::None };
    let mut recorder = LayerRecorder(Vec::new());
    let logits = model.forward(&mut [chunk], &mut recorder).unwrap();
    assert_eq!(recorder.0, [0, 1]);
    assert_eq!(logits, [Vec::<f32>::new()]);
}
