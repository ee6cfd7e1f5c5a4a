//! Settings of the whole process, made before it opens or creates anything.

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};

/// Makes the files that this process creates accessible to its user only: 0600, and 0700 for
/// directories. Pages hold the text of prompts in another form.
pub fn restrict_new_files() {
    umask(Mode::RWXG | Mode::RWXO);
}

/// Raises the soft limit of open files to the hard limit. Each connection and each L3 segment is an
/// open file, and the usual soft limit of 1024 is meant for programs that call `select`.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Every process may do so. Without it, a store node admits fewer connections and says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
