//! Link options of the shared library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Threads of the client run until the process ends, so `dlclose` must not unmap their code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
