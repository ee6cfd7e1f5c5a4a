//! The admin API: for `larder` commands, scripts and people.
//!
//! [`api`] has its types; the handlers are beside it.

pub mod api;
pub(crate) mod handlers;
pub(crate) mod prefix;
