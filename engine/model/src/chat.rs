//! Chat templates: Jinja as Hugging Face renders it.
//!
//! Invariants:
//! - A template is untrusted code. It sees the messages and the special tokens, and nothing else.
//! - The number of instructions is bounded ([`FUEL`]), and so is the text. Time and memory are not:
//!   one instruction can take any amount of both. Compile and render only in the process of
//!   [`template_worker`](crate::template_worker).

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum template instructions per rendering. A message takes some tens of them. Templates come
/// with the model folder and could loop for ever.
pub const FUEL: u64 = 20_000_000;

const NAME: &str = "chat_template";

/// Mark of the end of a message that the model continues. Unicode reserves the character for such
/// internal use. It is no blank, so templates that trim a content keep the blanks before it.
const CONTENT_END: char = '\u{FDD0}';

/// A message of a conversation, in the form of OpenAI's API. A template sees the fields that are
/// present.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: MessageContent,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Text that the model wrote before its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// In a message of the role `tool`: the call that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl ChatMessage {
    pub fn new(role: &str, content: impl Into<MessageContent>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }

    /// Size of all texts in bytes.
    pub fn bytes(&self) -> usize {
        let calls = self.tool_calls.iter().map(|call| call.id.len() + call.function.bytes());
        let others = [&self.name, &self.reasoning_content, &self.tool_call_id];
        let others = others.into_iter().flatten().map(String::len);
        self.role.len() + self.content.bytes() + calls.sum::<usize>() + others.sum::<usize>()
    }

    /// The message with [`CONTENT_END`] after its content.
    fn with_marked_end(&self) -> Self {
        let mut message = self.clone();
        match &mut message.content {
            MessageContent::Text(text) => text.push(CONTENT_END),
            MessageContent::Parts(parts) => match parts.last_mut() {
                Some(part) => part.text.push(CONTENT_END),
                None => parts.push(TextPart { text: CONTENT_END.into() }),
            },
        }
        message
    }

    fn to_value(&self, keeps_parts: bool) -> Result<Value, Error> {
        let mut fields =
            vec![("role", Value::from(self.role.as_str())), ("content", self.content.to_value(keeps_parts))];
        let texts = [
            ("name", &self.name),
            ("reasoning_content", &self.reasoning_content),
            ("tool_call_id", &self.tool_call_id),
        ];
        fields.extend(texts.into_iter().filter_map(|(name, text)| Some((name, Value::from(text.as_deref()?)))));
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(ToolCall::to_value).collect::<Result<Vec<_>, _>>()?;
            fields.push(("tool_calls", Value::from(calls)));
        }
        Ok(Value::from_pairs(fields))
    }
}

/// Text of a message, as one string or in parts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MessageContent {
    Text(String),
    Parts(Vec<TextPart>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "text")]
pub struct TextPart {
    pub text: String,
}

impl Default for MessageContent {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

impl<T: Into<String>> From<T> for MessageContent {
    fn from(text: T) -> Self {
        Self::Text(text.into())
    }
}

impl MessageContent {
    /// The whole text. Parts are separate lines.
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => text.into(),
            Self::Parts(parts) => parts.iter().map(|part| part.text.as_str()).collect::<Vec<_>>().join("\n").into(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts.iter().map(|part| part.text.len() + 1).sum(),
        }
    }

    fn to_value(&self, keeps_parts: bool) -> Value {
        match self {
            Self::Parts(parts) if keeps_parts => {
                parts.iter().map(|part| context! { type => "text", text => &part.text }).collect()
            }
            content => Value::from(content.text()),
        }
    }
}

/// A call of a tool by the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    #[serde(default)]
    pub id: String,
    pub function: FunctionCall,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCall {
    pub name: String,
    /// JSON object, as text.
    pub arguments: String,
}

impl FunctionCall {
    fn bytes(&self) -> usize {
        self.name.len() + self.arguments.len()
    }
}

impl ToolCall {
    /// The form that templates expect: with the arguments as an object.
    fn to_value(&self) -> Result<Value, Error> {
        let FunctionCall { name, arguments } = &self.function;
        let function = context! { name => name, arguments => from_json(arguments)? };
        Ok(context! { id => &self.id, type => "function", function => function })
    }
}

/// Inputs of a rendering besides the messages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RenderOptions {
    /// Ends the text with the cue for the assistant's answer.
    pub add_generation_prompt: bool,
    /// Ends the text with the content of the last message, so that the model continues it.
    pub continue_final_message: bool,
    /// Tools that the model may call: a JSON list.
    pub tools: Option<String>,
    /// More variables for the template: a JSON object.
    pub variables: Option<String>,
}

impl RenderOptions {
    pub fn bytes(&self) -> usize {
        [&self.tools, &self.variables].into_iter().flatten().map(String::len).sum()
    }
}

/// Names of the variables that every template gets. [`RenderOptions::variables`] cannot set them.
pub const RESERVED_VARIABLES: [&str; 6] =
    ["messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"];

/// A chat template before it is compiled, and the texts of the model's special tokens. A text is
/// empty if the model has no such token.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatTemplateSource {
    pub source: String,
    pub bos: String,
    pub eos: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The template does not compile, refuses the conversation, or runs out of [`FUEL`].
    #[error("the chat template failed: {0}")]
    Failed(String),
    #[error("the chat template wrote more text than allowed")]
    TooLong,
}

#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    keeps_parts: bool,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Compiles a template with the settings of transformers, so that it renders as in training.
    /// Fails on a syntax error.
    pub fn new(template: ChatTemplateSource) -> Result<ChatTemplate, RenderError> {
        let environment = environment(&template.source).map_err(failed)?;
        let keeps_parts = has_loop_over_content(&template.source);
        Ok(ChatTemplate { environment, keeps_parts, bos: template.bos, eos: template.eos })
    }

    /// Renders a conversation to a text of at most `text_bytes_max` bytes.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &RenderOptions,
        text_bytes_max: usize,
    ) -> Result<String, RenderError> {
        let context = self.context(messages, options).map_err(failed)?;
        let mut text = BoundedText { bytes: Vec::new(), bytes_max: text_bytes_max, is_full: false };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let rendered = template.render_captured_to(context, &mut text).map(drop);
        let text = match rendered {
            _ if text.is_full => return Err(RenderError::TooLong),
            Ok(()) => String::from_utf8(text.bytes).map_err(|error| RenderError::Failed(error.to_string()))?,
            Err(error) => return Err(failed(error)),
        };
        if options.continue_final_message && !messages.is_empty() { continued(text) } else { Ok(text) }
    }

    fn context(&self, messages: &[ChatMessage], options: &RenderOptions) -> Result<Value, Error> {
        let (messages, continued) = match messages.split_last() {
            Some((last, before)) if options.continue_final_message => (before, Some(last.with_marked_end())),
            _ => (messages, None),
        };
        let messages = messages.iter().chain(&continued).map(|message| message.to_value(self.keeps_parts));
        let messages = messages.collect::<Result<Vec<_>, _>>()?;
        let tools = options.tools.as_deref().map(from_json).transpose()?;
        let own = context! {
            messages => messages,
            // transformers passes both even if there are none, and some templates test for none.
            tools => tools.unwrap_or(Value::from(())),
            documents => Value::from(()),
            add_generation_prompt => options.add_generation_prompt,
            bos_token => &self.bos,
            eos_token => &self.eos,
        };
        Ok(match options.variables.as_deref().map(from_json).transpose()? {
            Some(variables) => context! { ..variables, ..own },
            None => own,
        })
    }
}

/// Cuts the text after the content of its last message, which ends with [`CONTENT_END`].
fn continued(mut text: String) -> Result<String, RenderError> {
    // The last one: a client may have written the same character before it.
    let Some(at) = text.rfind(CONTENT_END) else {
        return Err(RenderError::Failed(
            "the chat template changes the last message, so it cannot be continued".into(),
        ));
    };
    text.truncate(at);
    Ok(text)
}

fn from_json(json: &str) -> Result<Value, Error> {
    serde_json::from_str(json).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// Returns `true` if the template has a loop over the content of a message. It then gets the parts
/// of a content, and their whole text otherwise.
fn has_loop_over_content(source: &str) -> bool {
    let tags = source.split("{%").skip(1).filter_map(|rest| rest.split("%}").next());
    let mut loops = tags.filter_map(|tag| tag.trim_matches(['-', '+', ' ']).strip_prefix("for ")?.split_once(" in "));
    loops.any(|(_, list)| {
        let list = list.trim();
        [".content", "['content']", "[\"content\"]"].iter().any(|suffix| list.ends_with(suffix)) || list == "content"
    })
}

fn failed(error: Error) -> RenderError {
    RenderError::Failed(format!("{error:#}"))
}

fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    // The settings of transformers: trim_blocks, lstrip_blocks, loop controls, Python methods, no
    // escaping.
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: &str| strftime(format, SystemTime::now()));
    environment.add_filter("tojson", to_json);
    environment.add_template_owned(NAME, without_generation_tags(source))?;
    Ok(environment)
}

/// Output of a rendering. Refuses writes beyond its limit, which ends the rendering.
struct BoundedText {
    bytes: Vec<u8>,
    bytes_max: usize,
    is_full: bool,
}

impl io::Write for BoundedText {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + piece.len() > self.bytes_max {
            self.is_full = true;
            return Err(io::Error::other("the text exceeds its limit"));
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Implements `json.dumps(value, ensure_ascii=False)`: minijinja's filter without its HTML escapes.
fn to_json(value: &Value, indent: Option<Value>, args: Kwargs) -> Result<String, Error> {
    let escaped = minijinja::filters::tojson(value, indent, args)?;
    let mut json = String::new();
    let mut rest = escaped.as_str().unwrap_or_default();
    while let Some(at) = rest.find('\\') {
        let plain = [("\\u003c", "<"), ("\\u003e", ">"), ("\\u0026", "&"), ("\\u0027", "'")];
        json.push_str(&rest[..at]);
        rest = &rest[at..];
        let (escape_len, text) = match plain.iter().find(|(code, _)| rest.starts_with(code)) {
            Some((code, text)) => (code.len(), *text),
            // An escape is a backslash and one ASCII character. Skipping both keeps the second half
            // of an escaped backslash from starting an escape.
            None => (2.min(rest.len()), rest.get(..2).unwrap_or(rest)),
        };
        json.push_str(text);
        rest = &rest[escape_len..];
    }
    json.push_str(rest);
    Ok(json)
}

/// Replaces `{% generation %}` by `{% if true %}`. The tag marks the assistant's text for training,
/// and does not change the rendering.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let Some(len) = rest[at..].find("%}") else { break };
        let tag = &rest[at + 2..at + len];
        let word = tag.trim_matches(['-', '+']).trim();
        out.push_str(&rest[..at + 2]);
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[at + len + 2..];
    }
    out.push_str(rest);
    out
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats a UTC time with the `strftime` directives that templates use. Copies other directives
/// unchanged.
fn strftime(format: &str, time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil_date(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{:02}", (hour + 11) % 12 + 1)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Converts days since 1970-01-01 to year, month and day (proleptic Gregorian calendar, eras of 400
/// years).
fn civil_date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const GENERATE: RenderOptions =
        RenderOptions { add_generation_prompt: true, continue_final_message: false, tools: None, variables: None };

    fn conversation() -> Vec<ChatMessage> {
        [("system", " Be brief. "), ("user", "2 < 3 & \"x\" 'y' \\u003c?")]
            .map(|(role, content)| ChatMessage::new(role, content))
            .to_vec()
    }

    fn template(source: &str) -> Result<ChatTemplate, RenderError> {
        ChatTemplate::new(ChatTemplateSource { source: source.into(), bos: "<s>".into(), eos: "</s>".into() })
    }

    fn render(source: &str) -> Result<String, RenderError> {
        template(source)?.render(&conversation(), &GENERATE, 1000)
    }

    #[test]
    fn rendering_matches_transformers() {
        let source = "{{ bos_token }}{% for message in messages %}\n    {% if message['role'].upper() == 'SYSTEM' %}\n\
                      [{{ message.content.strip() }}]\n    {%- else %}\n{{ message.role }}: {{ message.content }}\n\
                      {{ eos_token }}\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}assistant:{% endif %}";
        let expected = "<s>[Be brief.]user: 2 < 3 & \"x\" 'y' \\u003c?\n</s>\nassistant:";
        assert_eq!(render(source).unwrap(), expected);
    }

    #[test]
    fn template_sees_tool_calls_names_and_variables() {
        let mut call = ChatMessage::new("assistant", "");
        call.reasoning_content = Some("hm".into());
        let function = FunctionCall { name: "f".into(), arguments: r#"{"b": [1.5, "x"], "a": {"n": 3}}"#.into() };
        call.tool_calls = vec![ToolCall { id: "c1".into(), function }];
        let mut result = ChatMessage::new("tool", "42");
        result.tool_call_id = Some("c1".into());
        result.name = Some("f".into());
        let source = "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}|{{ m.role }} \
                      {%- if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}\
                      {%- for c in m.tool_calls %}{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}\
                      {%- endfor %}{{ m.tool_call_id }}{{ m.name }}{% endfor %} {{ style }}{{ documents is none }}";
        let options = RenderOptions {
            tools: Some(r#"[{"type": "function", "function": {"name": "f", "a": 1}}]"#.into()),
            variables: Some(r#"{"style": "short"}"#.into()),
            ..RenderOptions::default()
        };
        let text = template(source).unwrap().render(&[call, result], &options, 1000).unwrap();
        let expected = "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"a\": 1}}|assistant(hm)c1:f\
                        {\"b\": [1.5, \"x\"], \"a\": {\"n\": 3}}|toolc1f shortTrue";
        assert_eq!(text, expected);
        assert!(template("{{ tools is none }}").unwrap().render(&[], &GENERATE, 99).unwrap() == "True");
    }

    #[test]
    fn continued_message_ends_the_text() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}";
        let options = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
        let messages = [ChatMessage::new("user", "1, 2"), ChatMessage::new("assistant", "1, ")];
        let rendered = template(source).unwrap().render(&messages, &options, 1000).unwrap();
        assert_eq!(rendered, "<user>1, 2</s><assistant>1, ");
        for last in ["<", "", "\u{FDD0}a"] {
            let messages = [ChatMessage::new("user", "a"), ChatMessage::new("assistant", last)];
            let rendered = template(source).unwrap().render(&messages, &options, 1000).unwrap();
            assert_eq!(rendered, format!("<user>a</s><assistant>{last}"));
        }
        let parts = ["a", "b "].map(|text| TextPart { text: text.into() }).to_vec();
        let parts = [ChatMessage::new("assistant", MessageContent::Parts(parts))];
        assert_eq!(template(source).unwrap().render(&parts, &options, 1000).unwrap(), "<assistant>a\nb ");
        let other = template("{{ messages[0].content }}").unwrap().render(&messages[..1], &options, 9).unwrap();
        assert_eq!(other, "1, 2");
        assert!(template("x").unwrap().render(&messages, &options, 9).is_err());
    }

    #[test]
    fn parts_reach_templates_that_have_a_loop_over_them() {
        let parts = ["a", "b"].map(|text| TextPart { text: text.into() }).to_vec();
        let messages = [ChatMessage::new("user", MessageContent::Parts(parts))];
        let render = |source: &str| template(source).unwrap().render(&messages, &GENERATE, 99).unwrap();
        let source = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}";
        assert_eq!(render(source), "[a][b]");
        assert_eq!(render("{% for m in messages %}{{ m.content }}{% endfor %}"), "a\nb");
    }

    #[test]
    fn tojson_does_not_escape_html() {
        let json = render("{{ messages[1].content | tojson }}").unwrap();
        assert_eq!(json, r#""2 < 3 & \"x\" 'y' \\u003c?""#);
        assert_eq!(render("{{ {'a': [1, true]} | tojson }}").unwrap(), r#"{"a": [1, true]}"#);
    }

    #[test]
    fn endless_and_refusing_templates_return_errors() {
        let refused = render("{{ raise_exception('no such role') }}").unwrap_err();
        assert!(refused.to_string().contains("no such role"));
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        assert!(render(endless).is_err());
        assert!(template("{% if %}").is_err());
    }

    #[test]
    fn text_above_the_limit_is_an_error() {
        let five = template("{{ 'é' }}{{ 'abc' }}").unwrap();
        assert_eq!(five.render(&[], &GENERATE, 5).unwrap(), "éabc");
        assert_eq!(five.render(&[], &GENERATE, 4), Err(RenderError::TooLong));
    }

    #[test]
    fn generation_tags_do_not_change_the_rendering() {
        let source = "{% for m in messages %}{%- generation -%} {{ m.role }} {%- endgeneration %};{% endfor %}";
        assert_eq!(render(source).unwrap(), "system;user;");
    }

    #[test]
    fn strftime_formats_utc_dates() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(strftime("%d %b %Y, %A %H:%M:%S %q%", at(0)), "01 Jan 1970, Thursday 00:00:00 %q%");
        assert_eq!(strftime("%Y-%m-%d %a %I%p %y %B", at(951_827_696)), "2000-02-29 Tue 12PM 00 February");
        assert_eq!(strftime("%Y-%m-%d", at(1_735_689_599)), "2024-12-31");
    }
}
