//! JSON objects of requests, taken apart field by field.
//!
//! Invariant: parsed JSON takes little more memory than its text. A general JSON value takes up to
//! a hundred times as much, for lists of small objects for example. So each field is parsed to its
//! own type, unknown fields are not parsed at all, and every list has a limit.

use super::errors::ApiError;
use crate::json::reason;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// Maximum number of fields of an object. OpenAI's requests have about 40.
const FIELDS_MAX: usize = 256;
/// Longest value that may be harmless although its field is not implemented, in bytes of JSON.
const HARMLESS_BYTES_MAX: usize = 4 << 10;

/// Fields of a JSON object, taken one by one. Parsing a whole struct at once could not tell the
/// client which field is wrong.
#[derive(Debug, Default)]
pub struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Fields<'a> {
    pub fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        if body.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
            // A message about JSON's syntax would not explain it.
            let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok();
            if is_json {
                return Err(ApiError::invalid("the request body must be a JSON object"));
            }
        }
        serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid(format!("the request body is not valid JSON: {}", reason(&error))))
    }

    /// Takes a field. A `null` counts as absent, because many clients send their unset options so.
    pub fn take<T: Deserialize<'a>>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            Some(value) if value.get() != "null" => serde_json::from_str(value.get()).map(Some).map_err(|error| {
                // The position counts from the start of the field, which the client does not see.
                let reason = reason(&error);
                let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason);
                ApiError::field(name, format!("'{name}' is not valid: {reason}"))
            }),
            _ => Ok(None),
        }
    }

    /// Takes a field that has two names. Some clients send both, for compatibility with older
    /// servers. Fails if their values differ, because one of them would have no effect.
    pub(super) fn take_either<T: Deserialize<'a> + PartialEq>(
        &mut self,
        name: &str,
        other: &str,
    ) -> Result<Option<T>, ApiError> {
        let value: Option<T> = self.take(name)?;
        let same: Option<T> = self.take(other)?;
        if value.is_some() && same.is_some() && value != same {
            let message = format!("'{other}' and '{name}' mean the same, and their values differ");
            return Err(ApiError::field(other, message));
        }
        Ok(value.or(same))
    }

    pub(crate) fn require<T: Deserialize<'a>>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::field(name, format!("'{name}' is required")))
    }

    pub(super) fn number(&mut self, name: &str, range: std::ops::RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        let value: Option<f32> = self.take(name)?;
        match value {
            Some(v) if !range.contains(&v) => {
                let message = format!("'{name}' is {v}; it must be from {} to {}", range.start(), range.end());
                Err(ApiError::field(name, message))
            }
            value => Ok(value),
        }
    }

    /// Drops a field whose value has no effect.
    pub(super) fn ignore(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// JSON text of a field.
    pub(super) fn get(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).map(|value| value.get()).filter(|value| *value != "null")
    }

    pub(super) fn insert(&mut self, name: &str, value: &'a RawValue) {
        self.0.insert(name.into(), value);
    }

    pub(super) fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&self.0)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Takes a field if its value fits. Returns `true` then.
    pub(super) fn take_if(&mut self, name: &str, fits: impl FnOnce(&Value) -> bool) -> bool {
        let Some(raw) = self.0.get(name).filter(|raw| raw.get().len() <= HARMLESS_BYTES_MAX) else { return false };
        let is_fit = serde_json::from_str::<Value>(raw.get()).is_ok_and(|value| fits(&value));
        if is_fit {
            self.0.remove(name);
        }
        is_fit
    }

    /// Refuses the first field that was not taken, unless it is null. For requests of clients that
    /// may be written for other servers.
    pub(super) fn refuse_unknown(&self) -> Result<(), ApiError> {
        match self.0.iter().find(|(_, value)| value.get() != "null") {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::unknown(name)),
        }
    }

    /// Refuses the first field that was not taken. For strict APIs, in which a misspelt field must
    /// not be ignored.
    pub(crate) fn refuse_rest(&self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(ApiError::field(name, format!("'{name}' is not a field of this request"))),
        }
    }

    /// Takes a field and refuses it unless it is absent, null, or `is_harmless`.
    pub(super) fn refuse_unless(
        &mut self,
        name: &str,
        is_harmless: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        let Some(raw) = self.0.remove(name) else { return Ok(()) };
        // Parsed to a general value, which a long one would multiply.
        let value = (raw.get().len() <= HARMLESS_BYTES_MAX).then(|| serde_json::from_str::<Value>(raw.get()));
        match value {
            Some(Ok(value)) if value.is_null() || is_harmless(&value) => Ok(()),
            _ => Err(ApiError::unsupported(name)),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object<'a>(PhantomData<&'a ()>);

        impl<'de: 'a, 'a> Visitor<'de> for Object<'a> {
            type Value = Fields<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Fields<'a>, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some((name, value)) = entries.next_entry::<String, &'a RawValue>()? {
                    fields.insert(name, value);
                    if fields.len() > FIELDS_MAX {
                        return Err(A::Error::custom(format!("more than {FIELDS_MAX} fields")));
                    }
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Object(PhantomData))
    }
}

/// List of at most `MAX` values. Parsing stops at the first one beyond.
#[derive(Debug)]
pub(super) struct BoundedList<T, const MAX: usize>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedList<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
            type Value = BoundedList<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = items.next_element()? {
                    if list.len() == MAX {
                        return Err(A::Error::custom(format!("a list of more than {MAX} values")));
                    }
                    list.push(item);
                }
                Ok(BoundedList(list))
            }
        }

        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// Object of at most `MAX` values.
#[derive(Debug)]
pub(super) struct BoundedMap<T, const MAX: usize>(pub(super) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedMap<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Object<T, MAX> {
            type Value = BoundedMap<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = entries.next_entry()? {
                    if list.len() == MAX {
                        return Err(A::Error::custom(format!("an object of more than {MAX} fields")));
                    }
                    list.push(entry);
                }
                Ok(BoundedMap(list))
            }
        }

        deserializer.deserialize_map(Object(PhantomData))
    }
}

/// Returns `true` for an object, list or text without content.
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// A string, or a list of at most `MAX` values.
#[derive(Debug)]
pub(super) enum TextOrList<T, const MAX: usize> {
    Text(String),
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for TextOrList<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Either<T, MAX> {
            type Value = TextOrList<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOrList::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(TextOrList::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
                let list = BoundedList::<T, MAX>::deserialize(serde::de::value::SeqAccessDeserializer::new(items))?;
                Ok(TextOrList::List(list.0))
            }
        }

        deserializer.deserialize_any(Either(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_are_not_parsed() {
        let body = br#" {"a": [1, {"b": null}], "c": null, "a": 7, "d": "x" } "#;
        let mut fields = Fields::parse(body).unwrap();
        assert_eq!((fields.take::<u32>("a").unwrap(), fields.take::<u32>("c").unwrap()), (Some(7), None));
        assert_eq!(fields.refuse_rest().unwrap_err().body.param.as_deref(), Some("d"));
        assert_eq!(
            fields.take::<u32>("d").unwrap_err().body.message,
            "'d' is not valid: invalid type: string \"x\", expected an integer from 0 to 4294967295"
        );
    }

    #[test]
    fn objects_and_lists_beyond_their_limits_are_refused() {
        let object =
            |count: usize| format!("{{{}}}", (0..count).map(|i| format!("\"f{i}\":0")).collect::<Vec<_>>().join(","));
        assert!(Fields::parse(object(FIELDS_MAX).as_bytes()).is_ok());
        let error = Fields::parse(object(FIELDS_MAX + 1).as_bytes()).unwrap_err();
        assert!(error.body.message.contains("more than 256 fields"), "{}", error.body.message);
        let list = |text: &str| serde_json::from_str::<BoundedList<u8, 2>>(text);
        assert_eq!(list("[1, 2]").unwrap().0, [1, 2]);
        assert!(list("[1, 2, 3]").unwrap_err().to_string().contains("more than 2"));
        assert!(list("7").is_err());
        let either = |text: &str| serde_json::from_str::<TextOrList<u8, 2>>(text);
        assert!(matches!(either("\"a\\n\""), Ok(TextOrList::Text(text)) if text == "a\n"));
        assert!(matches!(either("[3]"), Ok(TextOrList::List(list)) if list == [3]));
        assert!(either("[1, 2, 3]").is_err() && either("{}").is_err());
    }

    #[test]
    fn long_values_of_unsupported_fields_are_refused_unparsed() {
        let padded = format!(r#"{{"tools": [{}]}}"#, " ".repeat(HARMLESS_BYTES_MAX));
        let is_empty = |value: &Value| value.as_array().is_some_and(|list| list.is_empty());
        assert!(Fields::parse(br#"{"tools": []}"#).unwrap().refuse_unless("tools", is_empty).is_ok());
        assert!(Fields::parse(padded.as_bytes()).unwrap().refuse_unless("tools", is_empty).is_err());
    }
}
