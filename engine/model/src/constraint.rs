//! Constraints on the text of an answer, as requests carry them.
//!
//! A [`Constraint`] is data: [`GuideFactory`](crate::GuideFactory) compiles it for a tokenizer.
//!
//! Invariant: a constraint of at most [`CONSTRAINT_BYTES_MAX`] bytes is untrusted. Compiling it can
//! take any time. So routers and engines first compile each new one in a process that they can
//! stop.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt::Write;

/// Maximum size of a constraint: the bytes of its schemas, expressions and texts.
pub const CONSTRAINT_BYTES_MAX: usize = 128 << 10;
/// Blanks between the parts of a JSON text. Models indent by less. Without a limit, a model could
/// write blanks for ever.
const JSON_BLANKS: &str = r"[\x20\x0A\x0D\x09]{1,64}";
/// Schema of the arguments of a function that states none.
const NO_ARGUMENTS: &str = r#"{"type": "object", "properties": {}, "additionalProperties": false}"#;

/// Set of texts that an answer may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Constraint {
    JsonObject,
    /// JSON that keeps to this JSON schema.
    JsonSchema(String),
    /// Text that this regular expression matches as a whole.
    Regex(String),
    Choice(Vec<String>),
    /// Text of this Lark grammar, in the dialect of llguidance.
    Grammar(String),
    Calls(CallConstraint),
}

/// Calls of tools.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallConstraint {
    pub form: CallForm,
    pub functions: Vec<CallableFunction>,
    /// The answer may have several calls.
    pub is_parallel: bool,
    pub otherwise: Otherwise,
}

/// Answer without calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Otherwise {
    /// The answer must have a call.
    Never,
    /// JSON that keeps to this schema, in place of the calls.
    Json(String),
    /// Text, in place of the calls and before them.
    Text,
}

/// Text form of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallForm {
    /// `<tool_call>`, an object, `</tool_call>`.
    Hermes,
    /// One object.
    Llama3,
    /// `[TOOL_CALLS]` and a list of objects.
    MistralList,
    /// `[TOOL_CALLS]NAME[ARGS]{…}`.
    MistralArguments,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallableFunction {
    /// ASCII letters, digits, dots, `_` and `-`.
    pub name: String,
    /// JSON schema of the arguments.
    pub parameters: Option<String>,
}

impl Constraint {
    pub fn bytes(&self) -> usize {
        match self {
            Constraint::JsonObject => 0,
            Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Grammar(text) => text.len(),
            Constraint::Choice(choices) => choices.iter().map(String::len).sum(),
            Constraint::Calls(calls) => {
                let function = |f: &CallableFunction| f.name.len() + f.parameters.as_ref().map_or(0, String::len);
                let otherwise = if let Otherwise::Json(schema) = &calls.otherwise { schema.len() } else { 0 };
                calls.functions.iter().map(function).sum::<usize>() + otherwise
            }
        }
    }

    /// Grammar of the texts. `special_token` returns the id of a special token with this text.
    /// Fails for a schema that is not JSON.
    pub(crate) fn grammar(&self, special_token: impl Fn(&str) -> Option<u32>) -> Result<TopLevelGrammar, String> {
        let grammar = match self {
            Constraint::JsonObject => GrammarWithLexer::from_json_schema(schema(r#"{"type": "object"}"#)?),
            Constraint::JsonSchema(text) => GrammarWithLexer::from_json_schema(schema(text)?),
            Constraint::Regex(regex) => GrammarWithLexer::from_regex(regex),
            Constraint::Choice(choices) => GrammarWithLexer::from_lark(choice(choices)),
            Constraint::Grammar(lark) => GrammarWithLexer::from_lark(lark.clone()),
            Constraint::Calls(calls) => GrammarWithLexer::from_lark(calls.lark(special_token)?),
        };
        Ok(TopLevelGrammar::from_grammar(grammar))
    }
}

impl CallConstraint {
    /// Grammar of the calls. The blanks are those that chat templates teach.
    fn lark(&self, special_token: impl Fn(&str) -> Option<u32>) -> Result<String, String> {
        let token = |text: &str| special_token(text).map(|id| format!("<[{id}]>"));
        let mark = |text: &str| token(text).unwrap_or_else(|| literal(text));
        let begin = match self.form {
            CallForm::Hermes => Some("<tool_call>"),
            CallForm::Llama3 => None,
            CallForm::MistralList | CallForm::MistralArguments => Some("[TOOL_CALLS]"),
        };
        // Each form of calls after their first mark, and what stands between two of them.
        let (call, next) = match self.form {
            CallForm::Hermes => (format!("\"\\n\" function \"\\n\" {}", mark("</tool_call>")), "\"\\n\" BEGIN call"),
            // Its templates teach a single call.
            CallForm::Llama3 => ("function".into(), ""),
            CallForm::MistralList => ("\" \"? \"[\" function ITEMS \"]\"".into(), ""),
            CallForm::MistralArguments => ("function".into(), "BEGIN call"),
        };
        let items = if self.is_parallel { "(\", \" function)*" } else { "" };
        let call = call.replace("ITEMS", items);
        let begin_mark = begin.map(mark).unwrap_or_default();
        let several = if self.is_parallel && !next.is_empty() { format!("({next})*") } else { String::new() };
        let several = several.replace("BEGIN", &begin_mark);
        let mut lark = match &self.otherwise {
            Otherwise::Never => format!("start: {begin_mark} call {several}\n"),
            Otherwise::Json(answer) => {
                format!("start: {begin_mark} call {several} | answer\nanswer: %json {}\n", schema(answer)?)
            }
            Otherwise::Text => match begin {
                None => "start: call | TEXT\nTEXT: /\\s*([^{\\s](?s:.)*)?/\n".into(),
                Some(text) => {
                    // Where the mark is no special token, the shortest text that ends with it.
                    let before = match token(text) {
                        Some(token) => format!("before: TEXT? {token}\n"),
                        None => format!("before[lazy]: /(?s:.)*{}/\n", text.replace('[', "\\[")),
                    };
                    // `before` each call: a lexeme of any text would take the next mark with it.
                    let calls = if several.is_empty() { "before call" } else { "(before call)+" };
                    format!("start: {calls} TEXT? | TEXT?\n{before}TEXT: /(?s:.)+/\n")
                }
            },
        };
        let names: Vec<String> = (0..self.functions.len()).map(|at| format!("f{at}")).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(lark, "call: {call}\nfunction: {}", names.join(" | "));
        for (at, CallableFunction { name, parameters }) in self.functions.iter().enumerate() {
            let arguments = schema(parameters.as_deref().unwrap_or(NO_ARGUMENTS))?;
            let key = if self.form == CallForm::Llama3 { "parameters" } else { "arguments" };
            let written = match self.form {
                CallForm::MistralArguments => format!("{} {} a{at}", literal(name), mark("[ARGS]")),
                _ => {
                    let start = literal(&format!("{{\"name\": \"{name}\", \"{key}\": "));
                    format!("{start} a{at} {}", literal("}"))
                }
            };
            let _ = writeln!(lark, "f{at}: {written}\na{at}: %json {arguments}");
        }
        Ok(lark)
    }
}

/// Parses a schema, and sets the rules for blanks and alternatives unless it has its own.
fn schema(text: &str) -> Result<Value, String> {
    let mut schema: Value = serde_json::from_str(text).map_err(|error| format!("the schema is not JSON: {error}"))?;
    if let Value::Object(fields) = &mut schema {
        let rules = json!({"whitespace_pattern": JSON_BLANKS, "coerce_one_of": true});
        fields.entry("x-guidance").or_insert(rules);
    }
    Ok(schema)
}

/// Grammar of some texts. They are one lexeme: as rules, each would be an item of the parser.
fn choice(texts: &[String]) -> String {
    let written: Vec<String> = texts.iter().filter(|text| !text.is_empty()).map(|text| literal(text)).collect();
    match (written.len(), texts.len()) {
        (0, _) => "start: \"\"\n".into(),
        // A lexeme cannot be empty.
        (some, all) if some < all => format!("start: CHOICE?\nCHOICE: {}\n", written.join(" | ")),
        _ => format!("start: CHOICE\nCHOICE: {}\n", written.join(" | ")),
    }
}

/// Lark literal of a text, which has the syntax of a JSON string.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Optional constraint that several requests share.
pub(crate) mod shared {
    use super::Constraint;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub fn serialize<S: Serializer>(constraint: &Option<Arc<Constraint>>, serializer: S) -> Result<S::Ok, S::Error> {
        constraint.as_deref().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Arc<Constraint>>, D::Error> {
        Ok(Option::<Constraint>::deserialize(deserializer)?.map(Arc::new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constraints_survive_the_way_to_an_engine() {
        let calls = CallConstraint {
            form: CallForm::MistralList,
            functions: vec![CallableFunction { name: "f".into(), parameters: Some("{}".into()) }],
            is_parallel: true,
            otherwise: Otherwise::Never,
        };
        let all = [
            Constraint::JsonObject,
            Constraint::JsonSchema(r#"{"type": "null"}"#.into()),
            Constraint::Regex("a+".into()),
            Constraint::Choice(vec!["a".into(), "b\"\n".into()]),
            Constraint::Grammar("start: \"a\"".into()),
            Constraint::Calls(calls),
        ];
        for constraint in all {
            let text = serde_json::to_string(&constraint).unwrap();
            assert_eq!(serde_json::from_str::<Constraint>(&text).unwrap(), constraint, "{text}");
        }
        assert_eq!(Constraint::Choice(vec!["ab".into(), "c".into()]).bytes(), 3);
    }
}
