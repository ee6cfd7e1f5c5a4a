//! Calls of tools in the text of a model.
//!
//! Models write calls in one of a few formats, which their chat templates teach them. A
//! [`ToolParser`] takes the text in pieces. It returns text for the client, and calls as they are
//! written.
//!
//! A call begins with its *head*: all that comes before the brace of its arguments. The parser
//! holds a head back, and commits to the call at this brace. After that it returns the arguments at
//! once, and nothing makes them text again.
//!
//! Invariants:
//! - The pieces of a text give the same output, however the text is cut. So a stream and a whole
//!   answer agree.
//! - Text that looks like the head of a call and is none reaches the client as text.
//! - The parser holds at most [`HELD_BYTES_MAX`] bytes between two characters. Its time is linear
//!   in the text: it looks at a character a few times, and parses a head at most three times.

use serde::Deserialize;
use serde_json::value::RawValue;
use std::fmt;
use std::str::FromStr;

/// Format of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": …, "parameters": {…}}` at the beginning of the answer: Llama 3.1 to 3.3.
    Llama3,
    /// `[TOOL_CALLS]` before a list of calls, or before `NAME[ARGS]{…}`, in which newer models have
    /// `[CALL_ID]` and an id after the name: Mistral.
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
/// Mark before the id of a call. Answers have ids of this server instead.
const MISTRAL_ID: &str = "[CALL_ID]";
const LLAMA_BEGIN: &str = "<|python_tag|>";

/// Maximum length of the name of a function in characters, as in OpenAI's API.
pub(crate) const NAME_LEN_MAX: usize = 64;
/// Maximum size of the head of a call with the blanks before it. A longer one is text.
pub(crate) const HELD_BYTES_MAX: usize = 4096;
/// Maximum size of blanks that a call may remove. It leaves room for a head.
const BLANKS_BYTES_MAX: usize = 1024;

/// Returns `true` if a function may have this name, in a request and in an answer.
pub(crate) fn is_function_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && name.len() <= NAME_LEN_MAX && name.chars().all(is_letter)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolPiece {
    Text(String),
    /// Begins a call of the function with this name.
    Call(String),
    /// Continues the arguments of the last call, as the model writes them.
    Arguments(String),
}

/// Object of a call. `arguments` is `None` if it is absent or `null`.
#[derive(Deserialize)]
struct RawCall<'a> {
    name: Option<String>,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// Position in the text of a JSON object. The end of an object needs no more, and the arguments of
/// a call need not be valid JSON.
#[derive(Debug, Clone, Default)]
struct Nesting {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
}

impl Nesting {
    /// Returns `true` if `c` closes the object.
    fn step(&mut self, c: char) -> bool {
        if self.in_string {
            let ends = c == '"' && !self.is_escaped;
            self.is_escaped = c == '\\' && !self.is_escaped;
            self.in_string = !ends;
            return false;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth -= 1;
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Outside calls. `held` has blanks, and the beginning of a mark.
    Text,
    /// Outside calls, and no call can follow: Llama 3 after text.
    Plain,
    /// After the mark of Mistral, which has three continuations.
    Mark,
    /// Before the arguments of Mistral's calls that are no objects.
    Name,
    /// Before the object of a call, and in it up to its arguments.
    Head,
    /// `in_object`: the arguments are a member of the object of a call.
    Arguments { in_object: bool },
    /// After the arguments, in the object of a call.
    ArgumentsEnd,
    /// In later members of the object of a call, which nothing uses.
    Members,
    /// After an object of Mistral's list of calls.
    Item,
}

#[derive(Debug, Clone)]
pub(crate) struct ToolParser {
    format: ToolFormat,
    state: State,
    /// Text that may belong to the head of a call, or blanks that may precede one.
    held: String,
    /// Bytes at the end of `held` with which a mark begins. Only in [`State::Text`].
    mark_len: usize,
    nesting: Nesting,
    in_list: bool,
    has_calls: bool,
    /// Only blanks came since a call that an end mark may follow.
    may_end: bool,
    pieces: Vec<ToolPiece>,
}

impl ToolParser {
    pub(crate) fn new(format: ToolFormat) -> Self {
        Self {
            format,
            state: State::Text,
            held: String::new(),
            mark_len: 0,
            nesting: Nesting::default(),
            in_list: false,
            has_calls: false,
            may_end: false,
            pieces: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, text: &str) -> Vec<ToolPiece> {
        for c in text.chars() {
            // At most three times: at the end of a list, of a mark's beginning, and in the text.
            while !self.accept(c) {}
            if self.held.len() > HELD_BYTES_MAX {
                self.reject();
            }
        }
        std::mem::take(&mut self.pieces)
    }

    /// Returns the rest of the text. A call that has begun and not ended has the arguments so far.
    pub(crate) fn finish(&mut self) -> Vec<ToolPiece> {
        let held = self.held.trim_matches(|c| self.is_separator(c));
        // The line break after a call is no text, nor is a part of its end mark.
        if self.has_calls && held.is_empty() || self.may_end && HERMES_END.starts_with(held) {
            self.held.clear();
        }
        self.flush();
        std::mem::take(&mut self.pieces)
    }

    /// Returns `false` if the state has changed, and the new one must accept `c`.
    fn accept(&mut self, c: char) -> bool {
        match self.state {
            State::Text => return self.text(c),
            State::Plain => self.add_text(c.encode_utf8(&mut [0; 4])),
            State::Mark => match c {
                '{' | '[' => {
                    self.in_list = c == '[';
                    self.begin_head();
                    if c == '{' {
                        return false;
                    }
                    self.held.push(c);
                }
                _ if c.is_whitespace() => self.held.push(c),
                _ => {
                    self.state = State::Name;
                    return false;
                }
            },
            State::Name => {
                self.held.push(c);
                if c == '{' {
                    self.end_name();
                }
            }
            State::Head => return self.head(c),
            // No JSON, but the end mark of an object that lacks a brace.
            State::Arguments { .. } | State::Members
                if c == '<' && !self.nesting.in_string && self.format == ToolFormat::Hermes =>
            {
                self.end_call();
                return false;
            }
            State::Arguments { in_object } => {
                self.add_arguments(c.encode_utf8(&mut [0; 4]));
                if self.nesting.step(c) {
                    if in_object { self.state = State::ArgumentsEnd } else { self.end_call() }
                }
            }
            State::ArgumentsEnd => match c {
                '}' => self.end_call(),
                ',' => {
                    self.nesting = Nesting { depth: 1, ..Nesting::default() };
                    self.state = State::Members;
                }
                _ if c.is_whitespace() => {}
                _ => {
                    self.end_call();
                    return false;
                }
            },
            State::Members => {
                if self.nesting.step(c) {
                    self.end_call();
                }
            }
            State::Item => match c {
                ',' => {
                    self.held.push(c);
                    self.begin_head();
                }
                _ if c.is_whitespace() => {}
                _ => {
                    self.in_list = false;
                    self.state = State::Text;
                    return c == ']';
                }
            },
        }
        true
    }

    fn text(&mut self, c: char) -> bool {
        let is_llama = self.format == ToolFormat::Llama3;
        if self.mark_len == 0 && is_llama && c == '{' {
            self.begin_head();
            return false;
        }
        self.held.push(c);
        if self.mark_len == 0 && self.is_separator(c) {
            if self.held.len() > BLANKS_BYTES_MAX {
                self.reject();
            }
            return true;
        }
        self.mark_len += c.len_utf8();
        let begun = &self.held[self.held.len() - self.mark_len..];
        let mark = match self.format {
            ToolFormat::Hermes => HERMES_BEGIN,
            ToolFormat::Llama3 => LLAMA_BEGIN,
            ToolFormat::Mistral => MISTRAL_BEGIN,
        };
        if begun == mark {
            self.mark_len = 0;
            match self.format {
                ToolFormat::Hermes => self.begin_head(),
                // The object of a call needs no mark, so the mark is only held.
                ToolFormat::Llama3 => {}
                ToolFormat::Mistral => self.state = State::Mark,
            }
        } else if self.may_end && begun == HERMES_END {
            self.held.clear();
            self.mark_len = 0;
            self.may_end = false;
        } else if !(mark.starts_with(begun) || self.may_end && HERMES_END.starts_with(begun)) {
            // Another mark may begin with `c`, but none begins within another.
            let is_first = self.mark_len == c.len_utf8();
            if !is_first && !is_llama {
                self.held.pop();
                self.flush();
                return false;
            }
            self.reject();
        }
        true
    }

    fn is_separator(&self, c: char) -> bool {
        c.is_whitespace() || c == ';' && self.has_calls && self.format == ToolFormat::Llama3
    }

    fn begin_head(&mut self) {
        self.state = State::Head;
        self.nesting = Nesting::default();
    }

    fn head(&mut self, c: char) -> bool {
        if self.nesting.depth == 0 && c != '{' {
            if !c.is_whitespace() {
                self.reject();
                return false;
            }
            self.held.push(c);
            return true;
        }
        self.held.push(c);
        if self.nesting.step(c) {
            self.end_object();
        } else if c == '{' && self.nesting.depth == 2 && !self.nesting.in_string {
            self.begin_member();
        }
        true
    }

    /// Commits to a call if the member that begins is its arguments.
    fn begin_member(&mut self) {
        let object = self.object();
        let before = object[..object.len() - 1].trim_end().strip_suffix(':').map_or("", str::trim_end);
        let before = ["\"arguments\"", "\"parameters\""].iter().find_map(|key| before.strip_suffix(key));
        if before.is_none_or(|before| before.ends_with('\\')) {
            return;
        }
        let closed = format!("{object}}}}}");
        match serde_json::from_str(&closed) {
            // It may come after the arguments, if the whole object is short.
            Ok(RawCall { name: None, .. }) => {}
            Ok(RawCall { name: Some(name), .. }) if is_function_name(&name) => self.begin_call(name, "{", true),
            _ => self.reject(),
        }
    }

    /// Decides about an object that has ended without a commitment.
    fn end_object(&mut self) {
        let object = self.object().to_string();
        let call = serde_json::from_str(&object).ok().and_then(|RawCall { name, arguments }| {
            // Without marks, any other JSON answer with a name would look like a call.
            let default = (self.format != ToolFormat::Llama3).then_some("{}");
            let arguments = arguments.map(RawValue::get).or(default).filter(|json| json.starts_with('{'));
            name.filter(|name| is_function_name(name)).zip(arguments)
        });
        match call {
            Some((name, arguments)) => {
                self.begin_call(name, arguments, true);
                self.end_call();
            }
            None => self.reject(),
        }
    }

    /// Object of a call so far.
    fn object(&self) -> &str {
        &self.held[self.held.find('{').unwrap_or_default()..]
    }

    /// Commits to a call if its name is one.
    fn end_name(&mut self) {
        let name = self.held.trim_start().strip_prefix(MISTRAL_BEGIN).unwrap_or_default();
        let name = name.strip_suffix('{').unwrap_or_default().trim_end();
        let name = name.strip_suffix(MISTRAL_ARGUMENTS).unwrap_or(name);
        let name = name.split_once(MISTRAL_ID).map_or(name, |(name, _)| name).trim();
        if is_function_name(name) { self.begin_call(name.to_string(), "{", false) } else { self.reject() }
    }

    fn begin_call(&mut self, name: String, arguments: &str, in_object: bool) {
        self.held.clear();
        self.has_calls = true;
        self.pieces.push(ToolPiece::Call(name));
        self.add_arguments(arguments);
        self.nesting = Nesting { depth: 1, ..Nesting::default() };
        self.state = State::Arguments { in_object };
    }

    fn end_call(&mut self) {
        self.may_end = self.format == ToolFormat::Hermes;
        self.state = if self.in_list { State::Item } else { State::Text };
    }

    /// Returns the text held so far, which belongs to no call.
    fn reject(&mut self) {
        self.in_list = false;
        self.state = if self.format == ToolFormat::Llama3 { State::Plain } else { State::Text };
        self.flush();
    }

    fn flush(&mut self) {
        let text = std::mem::take(&mut self.held);
        self.mark_len = 0;
        self.may_end = false;
        self.add_text(&text);
    }

    fn add_text(&mut self, text: &str) {
        match self.pieces.last_mut() {
            _ if text.is_empty() => {}
            Some(ToolPiece::Text(last)) => last.push_str(text),
            _ => self.pieces.push(ToolPiece::Text(text.into())),
        }
    }

    fn add_arguments(&mut self, json: &str) {
        match self.pieces.last_mut() {
            Some(ToolPiece::Arguments(last)) => last.push_str(json),
            _ => self.pieces.push(ToolPiece::Arguments(json.into())),
        }
    }
}

#[cfg(test)]
mod tests;
