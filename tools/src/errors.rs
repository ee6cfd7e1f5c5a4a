//! Error messages for operators.

use anyhow::Error;

/// Formats an error with its causes, outermost first.
///
/// Many error types include their cause in their own message. A message that repeats another one of
/// the chain is left out, so that each fact appears once.
pub fn describe(error: &Error) -> String {
    let mut messages: Vec<String> = Vec::new();
    for cause in error.chain() {
        let message = cause.to_string();
        if messages.iter().any(|earlier| earlier.contains(&message)) {
            continue;
        }
        // The cause says everything that its context said, and more.
        if messages.last().is_some_and(|context| message.contains(context.as_str())) {
            messages.pop();
        }
        messages.push(message);
    }
    messages.join(": ")
}

/// Returns the innermost cause of a failed HTTP request, e.g. `Connection refused (os error 111)`.
///
/// The outer messages of the HTTP client name its internal layers and repeat the URL.
pub fn http_cause(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "no answer in time".into();
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn describe_prints_each_message_of_the_chain_once() {
        let repeated = anyhow!("/a is in use").context("L3: /a is in use").context("store node 0");
        assert_eq!(describe(&repeated), "store node 0: L3: /a is in use");
        let path_twice = anyhow!("/a/b: no such file").context("/a/b");
        assert_eq!(describe(&path_twice), "/a/b: no such file");
        let distinct = anyhow!("permission denied").context("cannot create /a");
        assert_eq!(describe(&distinct), "cannot create /a: permission denied");
    }
}
