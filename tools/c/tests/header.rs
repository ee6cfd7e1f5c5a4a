//! The committed header is the one that cbindgen generates from the source.

use std::path::{Path, PathBuf};

/// Files of the interface, in the order of the header.
const SOURCES: [&str; 5] = ["types.rs", "call.rs", "client.rs", "pages.rs", "steer.rs"];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn generated() -> String {
    let config = cbindgen::Config::from_file(file("cbindgen.toml")).expect("cbindgen.toml is valid");
    let sources = SOURCES.iter().map(|name| file("src").join(name));
    let builder = sources.fold(cbindgen::Builder::new().with_config(config), cbindgen::Builder::with_src);
    let mut header = Vec::new();
    builder.generate().expect("cbindgen understands the source").write(&mut header);
    let header = String::from_utf8(header).expect("a header is UTF-8");
    // Safety sections are for Rust. The header states what each argument must be.
    let mut lines: Vec<&str> = Vec::new();
    let mut is_safety = false;
    for line in header.lines() {
        is_safety = line.starts_with("//") && (is_safety || line == "// # Safety");
        if !is_safety {
            lines.push(line);
        } else if lines.last() == Some(&"//") {
            lines.pop();
        }
    }
    lines.join("\n") + "\n"
}

/// With `LARDER_WRITE_HEADER` set, writes the header instead of comparing it.
#[test]
fn committed_header_equals_the_generated_one() {
    let path = file("include/larder.h");
    let generated = generated();
    if std::env::var_os("LARDER_WRITE_HEADER").is_some() {
        std::fs::write(&path, &generated).expect("the header is writable");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let fix = "LARDER_WRITE_HEADER=1 cargo test --release -p larder-capi --test header";
    assert!(committed == generated, "include/larder.h differs from the source. Fix: {fix}");
    let version = format!("#define LARDER_VERSION \"{}\"", env!("CARGO_PKG_VERSION"));
    assert!(committed.contains(&version), "cbindgen.toml states another version than Cargo.toml");
}
