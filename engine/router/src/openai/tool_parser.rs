//! Calls of tools in the text of a model.
//!
//! Models write calls in one of a few formats, which their chat templates teach them. A
//! [`ToolParser`] takes the text in pieces, and returns text for the client and whole calls.
//!
//! Invariants:
//! - The pieces of a text give the same output, however the text is cut.
//! - Text that looks like a call and is none reaches the client as text.

use serde::Deserialize;
use serde_json::value::RawValue;
use std::fmt;
use std::str::FromStr;

/// Format of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": …, "parameters": {…}}` as the whole answer: Llama 3.1 to 3.3.
    Llama3,
    /// `[TOOL_CALLS]` before a list of calls, or before `NAME[ARGS]{…}`: Mistral.
    Mistral,
}

impl ToolFormat {
    /// Format that a chat template teaches. `None` if it teaches none of these.
    pub fn of_template(source: &str) -> Option<ToolFormat> {
        // Qwen3-Coder writes XML between the same marks.
        let is_xml = source.contains("<function=");
        if source.contains("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if source.contains(HERMES_BEGIN) && !is_xml {
            Some(Self::Hermes)
        } else if source.contains("<|start_header_id|>") && source.contains("\"parameters\":") {
            Some(Self::Llama3)
        } else {
            None
        }
    }

    pub fn new_call_id(self) -> String {
        match self {
            // Templates of Mistral accept no other length.
            Self::Mistral => format!("{:09x}", rand::random::<u64>() & 0xF_FFFF_FFFF),
            _ => format!("call_{:024x}", rand::random::<u128>() >> 32),
        }
    }
}

impl FromStr for ToolFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "hermes" => Ok(Self::Hermes),
            "llama3" => Ok(Self::Llama3),
            "mistral" => Ok(Self::Mistral),
            _ => Err("must be hermes, llama3 or mistral".into()),
        }
    }
}

impl fmt::Display for ToolFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hermes => "hermes",
            Self::Llama3 => "llama3",
            Self::Mistral => "mistral",
        })
    }
}

const HERMES_BEGIN: &str = "<tool_call>";
const HERMES_END: &str = "</tool_call>";
const MISTRAL_BEGIN: &str = "[TOOL_CALLS]";
const MISTRAL_ARGUMENTS: &str = "[ARGS]";
const LLAMA_BEGIN: &str = "<|python_tag|>";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolPiece {
    Text(String),
    Call(ParsedCall),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParsedCall {
    pub(crate) name: String,
    /// JSON object, as the model wrote it.
    pub(crate) arguments: String,
}

#[derive(Deserialize)]
struct RawCall<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

impl RawCall<'_> {
    fn parsed(self) -> Option<ParsedCall> {
        let arguments = self.arguments.map_or("{}", RawValue::get);
        arguments.starts_with('{').then(|| ParsedCall { name: self.name, arguments: arguments.into() })
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ToolParser {
    format: ToolFormat,
    /// Text that may belong to a mark or a call, or blanks that may precede one.
    held: String,
    is_in_call: bool,
    /// Some text other than blanks has been returned.
    has_text: bool,
    has_calls: bool,
}

impl ToolParser {
    pub(crate) fn new(format: ToolFormat) -> Self {
        Self { format, held: String::new(), is_in_call: false, has_text: false, has_calls: false }
    }

    pub(crate) fn push(&mut self, text: &str) -> Vec<ToolPiece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        loop {
            if !self.is_in_call {
                self.search_call(&mut pieces);
            }
            if !self.is_in_call || self.format != ToolFormat::Hermes {
                return pieces;
            }
            let Some(end) = self.held.find(HERMES_END) else { return pieces };
            let rest = self.held.split_off(end + HERMES_END.len());
            let written = std::mem::replace(&mut self.held, rest);
            self.is_in_call = false;
            let inner = written[..end].strip_prefix(HERMES_BEGIN).unwrap_or_default();
            match one_call(inner) {
                Some(call) => {
                    self.has_calls = true;
                    pieces.push(ToolPiece::Call(call));
                }
                None => self.emit(written, &mut pieces),
            }
        }
    }

    /// Returns the rest of the text.
    pub(crate) fn finish(&mut self) -> Vec<ToolPiece> {
        let held = std::mem::take(&mut self.held);
        let calls = match self.format {
            _ if !self.is_in_call => None,
            // The model left out the end mark, as it may at the end of its answer.
            ToolFormat::Hermes => held.strip_prefix(HERMES_BEGIN).and_then(one_call).map(|call| vec![call]),
            ToolFormat::Llama3 => llama_calls(held.trim_start().trim_start_matches(LLAMA_BEGIN)),
            ToolFormat::Mistral => mistral_calls(&held),
        };
        let mut pieces = Vec::new();
        match calls {
            Some(calls) => pieces.extend(calls.into_iter().map(ToolPiece::Call)),
            // The line break after a call is no text.
            None if self.has_calls && held.trim().is_empty() => {}
            None => self.emit(held, &mut pieces),
        }
        pieces
    }

    /// Returns text before the next call. Keeps blanks before it, and what may be its mark.
    fn search_call(&mut self, pieces: &mut Vec<ToolPiece>) {
        let mark = match self.format {
            ToolFormat::Hermes => HERMES_BEGIN,
            ToolFormat::Mistral => MISTRAL_BEGIN,
            ToolFormat::Llama3 => {
                let start = self.held.trim_start();
                let is_call = !self.has_text && (start.starts_with('{') || start.starts_with(LLAMA_BEGIN));
                let may_be_call = !self.has_text && LLAMA_BEGIN.starts_with(start);
                if is_call {
                    self.is_in_call = true;
                } else if !may_be_call {
                    let text = std::mem::take(&mut self.held);
                    self.emit(text, pieces);
                }
                return;
            }
        };
        let end = match self.held.find(mark) {
            Some(at) => {
                self.is_in_call = true;
                at
            }
            None => self.held.len() - partial(&self.held, mark),
        };
        let text_end = self.held[..end].trim_end().len();
        let rest = self.held.split_off(if self.is_in_call { end } else { text_end });
        let mut text = std::mem::replace(&mut self.held, rest);
        text.truncate(text_end);
        self.emit(text, pieces);
    }

    fn emit(&mut self, text: String, pieces: &mut Vec<ToolPiece>) {
        if !text.is_empty() {
            self.has_text |= !text.trim().is_empty();
            pieces.push(ToolPiece::Text(text));
        }
    }
}

/// Length of the longest end of `text` with which `mark` begins.
fn partial(text: &str, mark: &str) -> usize {
    (1..mark.len()).rev().find(|&len| text.as_bytes().ends_with(&mark.as_bytes()[..len])).unwrap_or(0)
}

fn one_call(json: &str) -> Option<ParsedCall> {
    serde_json::from_str::<RawCall<'_>>(json.trim()).ok()?.parsed()
}

/// Objects one after the other, with blanks or semicolons between them.
fn llama_calls(text: &str) -> Option<Vec<ParsedCall>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let mut objects = serde_json::Deserializer::from_str(rest).into_iter::<RawCall<'_>>();
        calls.push(objects.next()?.ok()?.parsed()?);
        rest = rest[objects.byte_offset()..].trim_start_matches([' ', '\n', '\t', ';']);
    }
    (!calls.is_empty()).then_some(calls)
}

fn mistral_calls(text: &str) -> Option<Vec<ParsedCall>> {
    let mut calls = Vec::new();
    for part in text.split(MISTRAL_BEGIN).map(str::trim).filter(|part| !part.is_empty()) {
        if part.starts_with('[') {
            let list: Vec<RawCall<'_>> = serde_json::from_str(part).ok()?;
            calls.extend(list.into_iter().map(RawCall::parsed).collect::<Option<Vec<_>>>()?);
            continue;
        }
        let (name, arguments) = part
            .split_once(MISTRAL_ARGUMENTS)
            .or_else(|| part.split_once('{').map(|(name, _)| (name, &part[name.len()..])))?;
        let arguments: &RawValue = serde_json::from_str(arguments).ok()?;
        calls.push(RawCall { name: name.trim().into(), arguments: Some(arguments) }.parsed()?);
    }
    (!calls.is_empty()).then_some(calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output for every way to cut the text in two, which must be equal.
    fn parse(format: ToolFormat, text: &str) -> (String, Vec<(String, String)>) {
        let run = |cut: usize| {
            let mut parser = ToolParser::new(format);
            let mut pieces = parser.push(&text[..cut]);
            pieces.extend(parser.push(&text[cut..]));
            pieces.extend(parser.finish());
            let mut out = (String::new(), Vec::new());
            for piece in pieces {
                match piece {
                    ToolPiece::Text(text) => out.0.push_str(&text),
                    ToolPiece::Call(call) => out.1.push((call.name, call.arguments)),
                }
            }
            out
        };
        let whole = run(0);
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            assert_eq!(run(cut), whole, "{cut} {text}");
        }
        whole
    }

    fn calls(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string())).collect()
    }

    #[test]
    fn hermes_calls_are_between_marks() {
        let text = "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"é</x>\"}}\n</tool_call>\n<tool_call>\n\
                    {\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
        let expected = calls(&[("f", "{\"a\": \"é</x>\"}"), ("g", "{}")]);
        assert_eq!(parse(ToolFormat::Hermes, text), ("I look.".into(), expected.clone()));
        let unfinished = text.strip_suffix("\n</tool_call>").unwrap();
        assert_eq!(parse(ToolFormat::Hermes, unfinished).1, expected);
        for text in ["a <tool_cal", "<tool_call>no JSON</tool_call> b ", "<tool_call>{\"name\": \"f\"", "x < y\n"] {
            assert_eq!(parse(ToolFormat::Hermes, text), (text.into(), vec![]));
        }
    }

    #[test]
    fn llama_calls_are_the_whole_answer() {
        let one = r#"{"name": "f", "parameters": {"a": 1}}"#;
        for text in [one.to_string(), format!("\n <|python_tag|>{one}"), format!("{one}\n")] {
            assert_eq!(parse(ToolFormat::Llama3, &text), (String::new(), calls(&[("f", r#"{"a": 1}"#)])), "{text}");
        }
        let two = format!("{one}; {{\"name\": \"g\", \"parameters\": {{}}}}");
        assert_eq!(parse(ToolFormat::Llama3, &two).1, calls(&[("f", r#"{"a": 1}"#), ("g", "{}")]));
        let later = format!("Call {one}");
        for text in ["{\"a\": 1}", "<|python_ta", "plain", "{\"name\": \"f\", \"parameters\": 5}", &later] {
            assert_eq!(parse(ToolFormat::Llama3, text), (text.to_string(), vec![]));
        }
    }

    #[test]
    fn mistral_calls_follow_a_mark() {
        let list = r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]"#;
        assert_eq!(parse(ToolFormat::Mistral, list), (String::new(), calls(&[("f", r#"{"a": 1}"#), ("g", "{}")])));
        for text in ["a[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}", "a [TOOL_CALLS]f{\"a\": 1}[TOOL_CALLS]g{}"]
        {
            assert_eq!(parse(ToolFormat::Mistral, text), ("a".into(), calls(&[("f", "{\"a\": 1}"), ("g", "{}")])));
        }
        for text in ["[TOOL", "[TOOL_CALLS] [{\"name\"", "x"] {
            assert_eq!(parse(ToolFormat::Mistral, text), (text.into(), vec![]));
        }
    }

    #[test]
    fn templates_tell_the_format() {
        for (source, format) in [
            ("<tool_call>\n{...}\n</tool_call>", Some(ToolFormat::Hermes)),
            ("<tool_call>\n<function=f>", None),
            ("[TOOL_CALLS] [", Some(ToolFormat::Mistral)),
            ("<|start_header_id|> '{\"name\": ' \"parameters\": ", Some(ToolFormat::Llama3)),
            ("{{ messages }}", None),
        ] {
            assert_eq!(ToolFormat::of_template(source), format, "{source}");
        }
        for format in [ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::Mistral] {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert_eq!(ToolFormat::Mistral.new_call_id().len(), 9);
    }
}
