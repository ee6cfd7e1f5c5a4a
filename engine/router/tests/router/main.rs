//! Tests of a whole router against fake engines: small HTTP servers that speak the engines'
//! interface and fail on request.

mod admin;
mod fakes;
mod hostile;
mod openai;
mod routing;
mod store;
