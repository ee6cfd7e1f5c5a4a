//! Readable reasons for JSON that a client sent wrongly.
//!
//! serde names Rust types in its messages ("expected u32", "expected struct Foo"). API users do not
//! know those types, so [`reason`] replaces them by JSON's own terms and keeps the rest of the
//! message.

/// serde's wording for expected and unexpected types, with the JSON term for it. Longer phrases
/// come first.
const TERMS: [(&str, &str); 18] = [
    ("invalid type: sequence", "invalid type: list"),
    ("invalid type: map", "invalid type: object"),
    ("expected a sequence", "expected a list"),
    ("expected a map", "expected an object"),
    ("expected map", "expected an object"),
    ("expected usize", "expected an integer of at least 0"),
    ("expected u128", "expected an integer of at least 0"),
    ("expected u64", "expected an integer of at least 0"),
    ("expected u32", "expected an integer from 0 to 4294967295"),
    ("expected u16", "expected an integer from 0 to 65535"),
    ("expected u8", "expected an integer from 0 to 255"),
    ("expected i64", "expected an integer"),
    ("expected i32", "expected an integer"),
    ("expected f32", "expected a number"),
    ("expected f64", "expected a number"),
    ("expected option", "expected a value or null"),
    ("expected unit", "expected null"),
    ("invalid type: unit", "invalid type: null"),
];

pub(crate) fn reason(error: &serde_json::Error) -> String {
    let mut message = error.to_string();
    for (rust, json) in TERMS {
        message = message.replace(rust, json);
    }
    // "expected struct Foo" and "expected struct Foo with 2 elements": a JSON object is the only
    // accepted form.
    for kind in ["expected struct ", "expected tuple struct ", "expected internally tagged enum ", "expected enum "] {
        while let Some(start) = message.find(kind) {
            let rest = start + kind.len();
            let end = message[rest..].find(' ').map_or(message.len(), |at| rest + at);
            message.replace_range(start..end, "expected an object");
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct PrivateName {
        count: u32,
        list: Vec<f32>,
        flag: Option<bool>,
    }

    #[test]
    fn reasons_name_no_rust_types() {
        for (body, expected) in [
            ("5", "expected an object at"),
            (r#"{"count": "x"}"#, "expected an integer from 0"),
            (r#"{"count": -1}"#, "expected an integer from 0"),
            (r#"{"count": 1, "list": {}}"#, "invalid type: object"),
            (r#"{"count": 1, "list": ["x"]}"#, "expected a number"),
            (r#"{"count": 1, "list": 3}"#, "expected a list"),
            (r#"{"list": []}"#, "missing field `count`"),
        ] {
            let reason = reason(&serde_json::from_str::<PrivateName>(body).unwrap_err());
            assert!(reason.contains(expected), "{body}: {reason}");
            for leak in ["PrivateName", "u32", "f32", "struct", "map", "sequence"] {
                assert!(!reason.contains(leak), "{body}: {reason}");
            }
        }
    }
}
