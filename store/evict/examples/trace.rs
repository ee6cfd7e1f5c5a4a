//! Hit rates on an uncompressed trace file, and on generated traffic:
//! `trace FILE [million tokens]…` or `trace synthetic`.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a tool: it reads files and clocks")]

use larder_evict::replay::{PolicyKind, Trace, run};
use larder_evict::synthetic::Kind;
use std::fs::File;
use std::io::BufReader;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let file = arguments.first().ok_or("usage: trace FILE [million tokens]… or trace synthetic")?;
    if file == "synthetic" {
        for kind in Kind::ALL {
            print_rates(&format!("{kind:?}"), &kind.trace(12_000, 1), &[0.1, 0.3, 1.0, 3.0, 10.0]);
        }
        return Ok(());
    }
    let trace = Trace::read(BufReader::new(File::open(file)?))?;
    let mut millions: Vec<f64> = arguments[1..].iter().map(|number| number.parse()).collect::<Result<_, _>>()?;
    if millions.is_empty() {
        millions = vec![0.3, 1.0, 3.0, 10.0, 30.0, 50.0];
    }
    let half = trace.requests().len() / 2;
    print_rates("whole", &trace, &millions);
    print_rates("first half", &trace.part(0..half), &millions);
    print_rates("second half", &trace.part(half..trace.requests().len()), &millions);
    Ok(())
}

fn print_rates(name: &str, trace: &Trace, millions: &[f64]) {
    for million in millions {
        print!("{name:14} {million:5} M tokens");
        let mut lru = 0.0;
        for policy in PolicyKind::ALL {
            let start = Instant::now();
            let outcome = run(trace, policy, (million * 1e6) as u64);
            let nanoseconds = start.elapsed().as_nanos() as f64 / outcome.blocks as f64;
            if policy == PolicyKind::Lru {
                lru = outcome.rate();
            }
            let ratio = outcome.rate() / lru;
            print!("   {policy} {:5.2} % ×{ratio:.3} ({nanoseconds:.0} ns)", outcome.rate() * 100.0);
        }
        println!();
    }
}
