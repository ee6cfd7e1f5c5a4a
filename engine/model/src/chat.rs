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
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum template instructions per rendering. A message takes some tens of them. Templates come
/// with the model folder and could loop for ever.
pub const FUEL: u64 = 20_000_000;

const NAME: &str = "chat_template";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: String,
}

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
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Compiles a template with the settings of transformers, so that it renders as in training.
    /// Fails on a syntax error.
    pub fn new(template: ChatTemplateSource) -> Result<ChatTemplate, RenderError> {
        let environment = environment(&template.source).map_err(failed)?;
        Ok(ChatTemplate { environment, bos: template.bos, eos: template.eos })
    }

    /// Renders a conversation to a text of at most `text_bytes_max` bytes. With `generate` it ends
    /// with the cue for the assistant's answer.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        generate: bool,
        text_bytes_max: usize,
    ) -> Result<String, RenderError> {
        let messages: Vec<Value> =
            messages.iter().map(|m| context! { role => &m.role, content => &m.content }).collect();
        let context = context! {
            messages => messages,
            add_generation_prompt => generate,
            bos_token => &self.bos,
            eos_token => &self.eos,
        };
        let mut text = BoundedText { bytes: Vec::new(), bytes_max: text_bytes_max, is_full: false };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let rendered = template.render_captured_to(context, &mut text).map(drop);
        match rendered {
            _ if text.is_full => Err(RenderError::TooLong),
            Ok(()) => String::from_utf8(text.bytes).map_err(|error| RenderError::Failed(error.to_string())),
            Err(error) => Err(failed(error)),
        }
    }
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

    fn conversation() -> Vec<ChatMessage> {
        [("system", " Be brief. "), ("user", "2 < 3 & \"x\" 'y' \\u003c?")]
            .map(|(role, content)| ChatMessage { role: role.into(), content: content.into() })
            .to_vec()
    }

    fn template(source: &str) -> Result<ChatTemplate, RenderError> {
        ChatTemplate::new(ChatTemplateSource { source: source.into(), bos: "<s>".into(), eos: "</s>".into() })
    }

    fn render(source: &str) -> Result<String, RenderError> {
        template(source)?.render(&conversation(), true, 1000)
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
        assert_eq!(five.render(&[], true, 5).unwrap(), "éabc");
        assert_eq!(five.render(&[], true, 4), Err(RenderError::TooLong));
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
