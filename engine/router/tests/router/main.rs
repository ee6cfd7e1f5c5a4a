//! A whole router against engines that are made for the test: small HTTP servers that speak the engines' interface, and
//! fail on request.

mod admin;
mod fakes;
mod openai;
mod routing;
mod store;
