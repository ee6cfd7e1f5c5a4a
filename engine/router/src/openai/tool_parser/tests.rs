use super::ToolPiece::{Arguments, Call, Text};
use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value};

const FORMATS: [ToolFormat; 3] = [ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::Mistral];

/// Output for a text that arrives in pieces of so many characters, and then one by one.
fn parse_in(format: ToolFormat, text: &str, lengths: &[usize]) -> Vec<ToolPiece> {
    let mut parser = ToolParser::new(format);
    let mut lengths = lengths.iter().copied().chain(std::iter::repeat(1));
    let mut output = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let length = lengths.next().unwrap();
        let (piece, behind) = rest.split_at(rest.char_indices().nth(length).map_or(rest.len(), |(at, _)| at));
        rest = behind;
        output.extend(parser.push(piece));
        assert!(parser.held.len() <= HELD_BYTES_MAX);
    }
    output.extend(parser.finish());
    merged(output)
}

/// Joins neighbours that a client joins.
fn merged(pieces: Vec<ToolPiece>) -> Vec<ToolPiece> {
    let mut all: Vec<ToolPiece> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (Some(Text(last)), Text(text)) | (Some(Arguments(last)), Arguments(text)) => last.push_str(&text),
            (_, piece) => all.push(piece),
        }
    }
    all
}

/// Text and calls, which must be equal for every way to cut the text in two.
fn parse(format: ToolFormat, text: &str) -> (String, Vec<(String, String)>) {
    let whole = parse_in(format, text, &[usize::MAX]);
    for cut in 0..=text.chars().count() {
        assert_eq!(parse_in(format, text, &[cut, usize::MAX]), whole, "{cut} {text}");
    }
    let mut out = (String::new(), Vec::new());
    for piece in whole {
        match piece {
            Text(text) => out.0.push_str(&text),
            Call(name) => out.1.push((name, String::new())),
            Arguments(json) => out.1.last_mut().unwrap().1.push_str(&json),
        }
    }
    out
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
    for end in ["\n</tool_call>", "l>", "}\n</tool_call>"] {
        let unfinished = text.strip_suffix(end).unwrap();
        assert_eq!(parse(ToolFormat::Hermes, unfinished), ("I look.".into(), expected.clone()), "{unfinished}");
    }
    for text in ["a <tool_cal", "a <tool_call>no JSON</tool_call> b ", "<tool_call>{\"name\": \"f\"", "x < y\n"] {
        assert_eq!(parse(ToolFormat::Hermes, text), (text.into(), vec![]));
    }
}

#[test]
fn llama_calls_begin_the_answer() {
    let one = r#"{"name": "f", "parameters": {"a": 1}}"#;
    for text in [one.to_string(), format!("\n <|python_tag|>{one}"), format!("{one}\n")] {
        assert_eq!(parse(ToolFormat::Llama3, &text), (String::new(), calls(&[("f", r#"{"a": 1}"#)])), "{text}");
    }
    let two = format!("{one}; {{\"name\": \"g\", \"parameters\": {{}}}}");
    assert_eq!(parse(ToolFormat::Llama3, &two).1, calls(&[("f", r#"{"a": 1}"#), ("g", "{}")]));
    let later = format!("Call {one}");
    let record = "{\"name\": \"Bob\", \"age\": 5}";
    for text in ["{\"a\": 1}", record, "<|python_ta", "plain", "{\"name\": \"f\", \"parameters\": 5}", &later] {
        assert_eq!(parse(ToolFormat::Llama3, text), (text.to_string(), vec![]));
    }
}

#[test]
fn mistral_calls_follow_a_mark() {
    let list = r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]"#;
    assert_eq!(parse(ToolFormat::Mistral, list), (String::new(), calls(&[("f", r#"{"a": 1}"#), ("g", "{}")])));
    for text in [
        "a[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}",
        "a [TOOL_CALLS]f{\"a\": 1}[TOOL_CALLS]g{}",
        "a[TOOL_CALLS]f[CALL_ID]9Xy2mAb1Q[ARGS]{\"a\": 1}[TOOL_CALLS]g[CALL_ID]000000001[ARGS]{}",
    ] {
        assert_eq!(parse(ToolFormat::Mistral, text), ("a".into(), calls(&[("f", "{\"a\": 1}"), ("g", "{}")])));
    }
    let one = r#"[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}"#;
    assert_eq!(parse(ToolFormat::Mistral, one), (String::new(), calls(&[("f", r#"{"a": 1}"#)])));
    for text in ["[TOOL", "[TOOL_CALLS] [{\"name\"", "[TOOL_CALLS]{\"a\": 1}", "[TOOL_CALLS]f[ARGS]", "x"] {
        assert_eq!(parse(ToolFormat::Mistral, text), (text.into(), vec![]));
    }
}

#[test]
fn marks_in_strings_of_arguments_are_text() {
    let arguments = r#"{"a": "x[TOOL_CALLS]g[ARGS]{}\" <tool_call></tool_call> \\"}"#;
    let object = format!(r#"{{"name": "f", "arguments": {arguments}}}"#);
    for (format, text) in [
        (ToolFormat::Mistral, format!("[TOOL_CALLS]f{arguments}")),
        (ToolFormat::Mistral, format!("[TOOL_CALLS]f[ARGS]{arguments}")),
        (ToolFormat::Mistral, format!("[TOOL_CALLS][{object}]")),
        (ToolFormat::Hermes, format!("<tool_call>{object}</tool_call>")),
    ] {
        assert_eq!(parse(format, &text), (String::new(), calls(&[("f", arguments)])), "{text}");
    }
}

#[test]
fn calls_that_have_begun_stay_calls() {
    let (hermes, mistral) = (ToolFormat::Hermes, ToolFormat::Mistral);
    for (format, text, rest, arguments) in [
        // Cut off at the limit of tokens.
        (hermes, r#"<tool_call>{"name": "f", "arguments": {"a": "x"#, "", r#"{"a": "x"#),
        (mistral, r#"[TOOL_CALLS]f[ARGS]{"a": ["#, "", r#"{"a": ["#),
        // No JSON.
        (hermes, r#"<tool_call>{"name": "f", "arguments": {'a': x}}</tool_call>"#, "", "{'a': x}"),
        // Braces missing or too many.
        (hermes, r#"<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> b"#, " b", r#"{"a": 1}"#),
        (hermes, r#"<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>b"#, "b", r#"{"a": 1"#),
        (hermes, r#"<tool_call>{"name": "f", "arguments": {}, "x": </tool_call>b"#, "b", "{}"),
        (hermes, r#"<tool_call>{"name": "f", "arguments": {}}}</tool_call>"#, "}</tool_call>", "{}"),
        (mistral, r#"[TOOL_CALLS][{"name": "f", "arguments": {}}, {"a": 1}] b"#, r#", {"a": 1}] b"#, "{}"),
        (mistral, r#"[TOOL_CALLS][{"name": "f", "arguments": {}} b"#, "b", "{}"),
        (ToolFormat::Llama3, r#"{"name": "f", "parameters": {}} is it."#, " is it.", "{}"),
    ] {
        assert_eq!(parse(format, text), (rest.into(), calls(&[("f", arguments)])), "{text}");
    }
}

#[test]
fn heads_may_have_other_members() {
    for object in [
        r#"{"type": "function", "x": [{"arguments": {}}], "name": "f", "arguments": {"a": 1}, "id": "}"}"#,
        r#"{"arguments": {"a": 1}, "name": "f"}"#,
        r#"{"my\"arguments": {"b": 2}, "name": "\u0066", "arguments" : {"a": 1}}"#,
        r#"{"\u0061rguments": {"a": 1}, "name": "f"}"#,
    ] {
        let text = format!("<tool_call>{object}</tool_call>");
        assert_eq!(parse(ToolFormat::Hermes, &text), (String::new(), calls(&[("f", r#"{"a": 1}"#)])), "{text}");
    }
    for object in [r#"{"name": "f"}"#, r#"{"name": "f", "arguments": null}"#] {
        let text = format!("<tool_call>{object}</tool_call>");
        assert_eq!(parse(ToolFormat::Hermes, &text), (String::new(), calls(&[("f", "{}")])), "{text}");
        assert_eq!(parse(ToolFormat::Llama3, object), (object.into(), vec![]));
    }
    for object in [
        r#"{"name": "f g", "arguments": {}}"#,
        r#"{"name": 5, "arguments": {}}"#,
        r#"{name: "f", "arguments": {}}"#,
        r#"{"name": "f", "name": "f", "arguments": {}}"#,
        r#"{"name": "f", "arguments": "{}"}"#,
    ] {
        let text = format!("<tool_call>{object}</tool_call>");
        assert_eq!(parse(ToolFormat::Hermes, &text), (text.clone(), vec![]));
    }
}

#[test]
fn arguments_are_never_held_back() {
    for (format, head) in [
        (ToolFormat::Hermes, r#"<tool_call>{"name": "f", "arguments": {"#),
        (ToolFormat::Llama3, r#"{"name": "f", "parameters": {"#),
        (ToolFormat::Mistral, r#"[TOOL_CALLS][{"name": "f", "arguments": {"#),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARGS]{"),
    ] {
        let mut parser = ToolParser::new(format);
        assert_eq!(parser.push(head), [Call("f".into()), Arguments("{".into())]);
        for c in r#" "a" : [[{" [TOOL_CALLS] "#.repeat(1000).chars() {
            assert_eq!(parser.push(&c.to_string()), [Arguments(c.into())]);
            assert!(parser.held.is_empty());
        }
    }
}

#[test]
fn long_heads_and_blanks_are_text() {
    let long = "x".repeat(HELD_BYTES_MAX);
    let blanks = " ".repeat(BLANKS_BYTES_MAX + 1);
    for (format, text) in [
        (ToolFormat::Hermes, format!("<tool_call>{{\"x\": \"{long}\", \"name\": \"f\", \"arguments\": {{}}}}")),
        (ToolFormat::Llama3, format!("{{\"x\": \"{long}\", \"name\": \"f\", \"parameters\": {{}}}}")),
        (ToolFormat::Mistral, format!("[TOOL_CALLS]{long}[ARGS]{{}}")),
        (ToolFormat::Mistral, format!("[TOOL_CALLS]{}", " ".repeat(HELD_BYTES_MAX))),
        (ToolFormat::Llama3, "<|python_tag|>".repeat(1000)),
        (ToolFormat::Hermes, blanks.clone()),
        (ToolFormat::Llama3, blanks),
    ] {
        assert_eq!(parse_in(format, &text, &[]), [Text(text.clone())]);
        let mut parser = ToolParser::new(format);
        assert_ne!(parser.push(&text), [], "a bound, not the end, made it text");
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
    for format in FORMATS {
        assert_eq!(format.to_string().parse(), Ok(format));
    }
    assert_eq!(ToolFormat::Mistral.new_call_id().len(), 9);
}

/// Parts of strings and of texts that are no calls, but look like some.
const FRAGMENTS: [&str; 24] = [
    HERMES_BEGIN,
    HERMES_END,
    MISTRAL_BEGIN,
    MISTRAL_ARGUMENTS,
    MISTRAL_ID,
    LLAMA_BEGIN,
    "<tool",
    "[TOOL",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    ",",
    ":",
    ";",
    " ",
    "\n",
    "é",
    "f",
    "\"name\": \"f\"",
    "\"arguments\": {",
    "{\"name\": \"g\", \"parameters\": {\"a\": [",
];

fn fragments(count: usize) -> impl Strategy<Value = String> {
    vec(select(&FRAGMENTS[..]), 0..count).prop_map(|parts| parts.concat())
}

/// JSON object, as compact or as spread as models write it.
fn arguments() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        fragments(5).prop_map(Value::from),
    ];
    let value = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(Value::from),
            vec((fragments(3), inner), 0..3).prop_map(|members| Value::from(Map::from_iter(members))),
        ]
    });
    (vec((fragments(3), value), 0..3), any::<bool>()).prop_map(|(members, is_spread)| {
        let value = Value::from(Map::from_iter(members));
        if is_spread { format!("{value:#}") } else { value.to_string() }
    })
}

/// Text of an answer with calls, its format, and the output that it must give.
#[derive(Debug, Clone)]
struct Answer {
    format: ToolFormat,
    text: String,
    output: Vec<ToolPiece>,
}

fn answer() -> impl Strategy<Value = Answer> {
    let name = select(&["f", "get_weather", "a-b.c", "arguments"][..]);
    let extra =
        select(&[("", ""), ("\"type\": \"function\", ", ""), ("", ", \"id\": \"}]\""), ("\"x\": [{}],", " ")][..]);
    let call = (name, arguments(), extra);
    let before = select(&["", "I look.", "é <x> [y]"][..]);
    let after = select(&["", "\n", " Done.", "\n<x"][..]);
    (0..6usize, vec(call, 1..4), before, after).prop_map(|(form, calls, before, after)| {
        // Llama 3 has calls at the beginning only.
        let before = if form == 1 { "" } else { before };
        let objects = calls.iter().map(|(name, arguments, extra)| {
            let key = if form == 1 { "parameters" } else { "arguments" };
            format!("{{{}\"name\": \"{name}\", \"{key}\": {arguments}{}}}", extra.0, extra.1)
        });
        let named = |mark: &str| calls.iter().map(|call| format!("[TOOL_CALLS]{}{mark}{}", call.0, call.1)).collect();
        let (format, written): (_, String) = match form {
            0 => (ToolFormat::Hermes, objects.map(|o| format!("\n<tool_call>\n{o}\n</tool_call>")).collect()),
            1 => (ToolFormat::Llama3, objects.collect::<Vec<_>>().join("; ")),
            2 => (ToolFormat::Mistral, format!("[TOOL_CALLS] [{}]", objects.collect::<Vec<_>>().join(", "))),
            3 => (ToolFormat::Mistral, named("[ARGS]")),
            4 => (ToolFormat::Mistral, named("[CALL_ID]0123abcde[ARGS]")),
            _ => (ToolFormat::Mistral, objects.map(|o| format!(" [TOOL_CALLS]{o}")).collect()),
        };
        let mut output = vec![Text(before.into())];
        for (name, arguments, _) in &calls {
            output.extend([Call(name.to_string()), Arguments(arguments.clone())]);
        }
        output.push(Text(if after.trim().is_empty() { "" } else { after }.into()));
        output.retain(|piece| *piece != Text(String::new()));
        Answer { format, text: format!("{before}{written}{after}"), output }
    })
}

proptest! {
    #[test]
    fn every_split_gives_the_calls_of_the_whole(answer in answer(), lengths in vec(1usize..20, 0..40)) {
        prop_assert_eq!(parse_in(answer.format, &answer.text, &[usize::MAX]), answer.output.clone());
        prop_assert_eq!(parse_in(answer.format, &answer.text, &lengths), answer.output);
    }

    #[test]
    fn cut_answers_have_the_beginnings_of_their_calls(
        answer in answer(),
        end in any::<prop::sample::Index>(),
        lengths in vec(1usize..20, 0..40),
    ) {
        let text: String = answer.text.chars().take(end.index(answer.text.chars().count() + 1)).collect();
        let output = parse_in(answer.format, &text, &lengths);
        prop_assert_eq!(&parse_in(answer.format, &text, &[usize::MAX]), &output);
        let only_calls = |pieces: Vec<ToolPiece>| -> Vec<_> {
            pieces.into_iter().filter(|piece| !matches!(piece, Text(_))).collect()
        };
        let (mut cut, whole) = (only_calls(output), only_calls(answer.output));
        if let Some(Arguments(last)) = cut.pop() {
            prop_assert_eq!(&cut, &whole[..cut.len()]);
            let Arguments(of_whole) = &whole[cut.len()] else { panic!("{whole:?}") };
            prop_assert!(of_whole.starts_with(&last));
        }
    }

    #[test]
    fn any_text_gives_the_same_for_every_split(
        text in fragments(40),
        format in select(&FORMATS[..]),
        lengths in vec(1usize..20, 0..40),
    ) {
        let output = parse_in(format, &text, &lengths);
        prop_assert_eq!(&parse_in(format, &text, &[usize::MAX]), &output);
        if !output.iter().any(|piece| matches!(piece, Call(_))) {
            let expected = if text.is_empty() { vec![] } else { vec![Text(text)] };
            prop_assert_eq!(output, expected);
        }
    }
}
