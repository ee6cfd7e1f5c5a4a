//! Admin API for `larder` commands, scripts and operators.
//!
//! - [`api`]: paths and types, also used by clients.
//! - `error`: errors, as clients see them.
//! - `handlers`: HTTP server and request parsing.
//! - `prefix`: operations on the pages of a prefix.

pub mod api;
pub(crate) mod error;
pub(crate) mod handlers;
pub(crate) mod prefix;
