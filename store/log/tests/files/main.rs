//! The log on real files. One program has all of these tests, because each program contains the log
//! and its dependencies.
//!
//! A test must not change the process: no environment, no limits, no current directory.

mod closing;
mod common;
mod damage;
mod list;
mod names;
mod reads_and_writes;
mod recovery;
mod retention;
mod scrub;
mod unreadable;
