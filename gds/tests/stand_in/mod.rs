//! The stand-in for libcufile, compiled by the system's C compiler.

use libloading::Library;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use tempfile::TempDir;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in/cufile.c");

/// Breach of the library's contract, with the number that `cufile.c` gives it.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    None = 0,
    ShortReads = 1,
    LibraryError = 2,
    SystemError = 3,
    EndOfFile = 4,
    FlippedBit = 5,
    LongRead = 6,
    Hang = 7,
    OpenError = 8,
    OpenHang = 9,
    FileError = 10,
    MemoryError = 11,
}

/// Number that the library counts.
#[derive(Debug, Clone, Copy)]
pub enum Count {
    Files = 0,
    Buffers = 1,
    Hanging = 2,
    Reads = 3,
}

/// A copy of the library with a state of its own.
pub struct StandIn {
    library: Library,
    pub path: PathBuf,
    _folder: TempDir,
}

impl StandIn {
    pub fn new() -> StandIn {
        static COMPILED: OnceLock<Vec<u8>> = OnceLock::new();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcufile.so.0");
        std::fs::write(&path, COMPILED.get_or_init(compile)).unwrap();
        // SAFETY: the library has no initialiser.
        let library = unsafe { Library::new(&path) }.unwrap();
        StandIn { library, path, _folder: folder }
    }

    /// Sets the fault, and the mode that the library reports.
    pub fn set(&self, fault: Fault, is_direct: bool) {
        // SAFETY: the function has this type (cufile.c).
        let set = unsafe { self.library.get::<unsafe extern "C" fn(i32, i32)>("stand_in_set") }.unwrap();
        // SAFETY: the function accepts all numbers.
        unsafe { set(fault as i32, i32::from(is_direct)) };
    }

    pub fn count(&self, which: Count) -> i32 {
        // SAFETY: the function has this type (cufile.c).
        let count = unsafe { self.library.get::<unsafe extern "C" fn(i32) -> i32>("stand_in_count") }.unwrap();
        // SAFETY: the function accepts all numbers.
        unsafe { count(which as i32) }
    }
}

/// Compiles the source and returns the library's bytes.
fn compile() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("stand_in.so");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Werror", "-o"]).arg(&library).arg(SOURCE);
    let output = command.output().expect("the tests need a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(&library).unwrap()
}
