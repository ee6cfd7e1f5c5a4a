//! Fields that constrain the text of an answer: OpenAI's `response_format`, and those of vLLM and
//! SGLang.

use super::RequestContext;
use super::errors::ApiError;
use super::fields::{BoundedList, Fields, is_empty};
use super::tool_parser::ToolFormat;
use super::tools::{ToolChoice, ToolRequest};
use super::types::{CommonParams, is_false};
use crate::metrics::RefusalReason;
use crate::models::ServedModel;
use crate::route::RouteError;
use larder_model::constraint::CONSTRAINT_BYTES_MAX;
use larder_model::{CallConstraint, CallForm, CallableFunction, Constraint, Otherwise};
use larder_worker::trials::TrialError;
use serde_json::value::RawValue;
use std::sync::Arc;

/// Maximum number of texts of `guided_choice`.
const CHOICES_MAX: usize = 1024;
/// Arguments of a function that need not keep to their schema.
const ANY_ARGUMENTS: &str = r#"{"type": "object"}"#;

/// Constraint of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedConstraint {
    pub constraint: Arc<Constraint>,
    /// Field that has it, for error messages.
    pub field: &'static str,
}

impl RequestedConstraint {
    fn new(constraint: Constraint, field: &'static str) -> Result<Self, ApiError> {
        let bytes = constraint.bytes();
        if bytes > CONSTRAINT_BYTES_MAX {
            let message = format!("'{field}' has {bytes} bytes; a constraint may have at most {CONSTRAINT_BYTES_MAX}");
            return Err(ApiError::field(field, message));
        }
        Ok(Self { constraint: Arc::new(constraint), field })
    }
}

/// Takes the constraint of OpenAI's and vLLM's fields. Fails for more than one.
pub(super) fn take(fields: &mut Fields<'_>) -> Result<Option<RequestedConstraint>, ApiError> {
    let mut found: Vec<(&'static str, Constraint)> = Vec::new();
    if let Some(format) = fields.take::<Fields<'_>>("response_format")? {
        found.extend(response_format(format)?);
    }
    for (field, kind) in GUIDED {
        found.extend(of_kind(fields, field, kind)?.map(|constraint| (field, constraint)));
    }
    if let Some(mut outputs) = fields.take::<Fields<'_>>("structured_outputs")? {
        for (name, kind) in STRUCTURED {
            found.extend(of_kind(&mut outputs, name, kind)?.map(|constraint| ("structured_outputs", constraint)));
        }
        for name in ["disable_fallback", "disable_any_whitespace", "disable_additional_properties"] {
            outputs.refuse_unless(name, is_false)?;
        }
        outputs.refuse_unknown()?;
    }
    only(found)
}

/// Takes the constraint of SGLang's sampling parameters.
pub(super) fn take_native(params: &mut Fields<'_>) -> Result<Option<RequestedConstraint>, ApiError> {
    // SGLang's grammars have another syntax.
    params.refuse_unless("ebnf", is_empty)?;
    params.refuse_unless("structural_tag", is_empty)?;
    let mut found: Vec<(&'static str, Constraint)> = Vec::new();
    for (field, kind) in [("json_schema", Kind::Json), ("regex", Kind::Regex)] {
        found.extend(of_kind(params, field, kind)?.map(|constraint| (field, constraint)));
    }
    only(found)
}

fn only(found: Vec<(&'static str, Constraint)>) -> Result<Option<RequestedConstraint>, ApiError> {
    if let [(first, _), (second, _), ..] = &found[..] {
        return Err(ApiError::field(second, format!("'{second}' and '{first}' exclude each other")));
    }
    found.into_iter().next().map(|(field, constraint)| RequestedConstraint::new(constraint, field)).transpose()
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Json,
    JsonObject,
    Regex,
    Choice,
    Grammar,
}

const GUIDED: [(&str, Kind); 4] = [
    ("guided_json", Kind::Json),
    ("guided_regex", Kind::Regex),
    ("guided_choice", Kind::Choice),
    ("guided_grammar", Kind::Grammar),
];
const STRUCTURED: [(&str, Kind); 5] = [
    ("json", Kind::Json),
    ("json_object", Kind::JsonObject),
    ("regex", Kind::Regex),
    ("choice", Kind::Choice),
    ("grammar", Kind::Grammar),
];

fn of_kind(fields: &mut Fields<'_>, name: &str, kind: Kind) -> Result<Option<Constraint>, ApiError> {
    Ok(match kind {
        Kind::Json => fields.take::<&RawValue>(name)?.map(|schema| schema_of(name, schema)).transpose()?,
        Kind::JsonObject => fields.take(name)?.unwrap_or(false).then_some(Constraint::JsonObject),
        Kind::Regex => fields.take(name)?.map(Constraint::Regex),
        Kind::Grammar => fields.take(name)?.map(Constraint::Grammar),
        Kind::Choice => match fields.take::<BoundedList<String, CHOICES_MAX>>(name)? {
            Some(BoundedList(choices)) if choices.is_empty() => {
                return Err(ApiError::field(name, format!("'{name}' has no text")));
            }
            choices => choices.map(|choices| Constraint::Choice(choices.0)),
        },
    })
}

/// Schema that is an object, or JSON text in a string.
fn schema_of(name: &str, schema: &RawValue) -> Result<Constraint, ApiError> {
    let text = match schema.get() {
        text if text.starts_with('"') => serde_json::from_str(text).unwrap_or_default(),
        text => text.to_string(),
    };
    let is_schema = text.trim_start().starts_with('{') || matches!(text.trim(), "true");
    match is_schema {
        true => Ok(Constraint::JsonSchema(text)),
        false => Err(ApiError::field(name, format!("'{name}' must be a JSON schema"))),
    }
}

fn response_format(mut format: Fields<'_>) -> Result<Option<(&'static str, Constraint)>, ApiError> {
    const SCHEMA: &str = "response_format.json_schema.schema";
    let within = |error: ApiError| error.within("response_format");
    let kind: String = format.require("type").map_err(within)?;
    let constraint = match kind.as_str() {
        "text" => None,
        "json_object" => Some(("response_format", Constraint::JsonObject)),
        "json_schema" => {
            let within_schema = |error: ApiError| within(error.within("json_schema"));
            let mut described: Fields<'_> = format.require("json_schema").map_err(within)?;
            let schema: &RawValue = described.require("schema").map_err(within_schema)?;
            for text in ["name", "description"] {
                described.take::<String>(text).map_err(within_schema)?;
            }
            // The answer keeps to the schema in any case.
            described.take::<bool>("strict").map_err(within_schema)?;
            described.refuse_unknown().map_err(within_schema)?;
            Some((SCHEMA, schema_of("schema", schema).map_err(within_schema)?))
        }
        _ => return Err(ApiError::unsupported("response_format")),
    };
    format.refuse_unknown().map_err(within)?;
    Ok(constraint)
}

/// Constrains the answer to the tools that the request wants to be called.
pub(super) fn add_calls(
    common: &mut CommonParams,
    tools: &ToolRequest,
    format: ToolFormat,
    model: &ServedModel,
) -> Result<(), ApiError> {
    let template = model.tokenizer.chat_template().map_or("", |template| &template.source);
    let form = match format {
        ToolFormat::Hermes => CallForm::Hermes,
        ToolFormat::Llama3 => CallForm::Llama3,
        ToolFormat::Mistral if template.contains("[ARGS]") => CallForm::MistralArguments,
        ToolFormat::Mistral => CallForm::MistralList,
    };
    let requested = common.constraint.take();
    let is_auto = tools.choice == ToolChoice::Auto;
    let json = requested.as_ref().map(|RequestedConstraint { constraint, field }| match &**constraint {
        Constraint::JsonObject => Ok(ANY_ARGUMENTS.to_string()),
        Constraint::JsonSchema(schema) => Ok(schema.clone()),
        _ => Err(ApiError::field(field, format!("'{field}' and 'tools' exclude each other"))),
    });
    let otherwise = match json.transpose()? {
        // A required call leaves no room for another answer.
        _ if !is_auto => Otherwise::Never,
        None if !tools.functions.iter().any(|function| function.is_strict) => return Ok(()),
        None => Otherwise::Text,
        Some(schema) => Otherwise::Json(schema),
    };
    let functions = tools.functions.iter().filter(|function| match &tools.choice {
        ToolChoice::Named(name) => function.name == *name,
        ToolChoice::Auto | ToolChoice::Required => true,
    });
    let functions = functions.map(|function| {
        let is_free = is_auto && !function.is_strict;
        let parameters = if is_free { Some(ANY_ARGUMENTS.into()) } else { function.parameters.clone() };
        CallableFunction { name: function.name.clone(), parameters }
    });
    let is_parallel = tools.is_parallel && !matches!(tools.choice, ToolChoice::Named(_));
    let calls = CallConstraint { form, functions: functions.collect(), is_parallel, otherwise };
    common.constraint = Some(RequestedConstraint::new(Constraint::Calls(calls), "tools")?);
    Ok(())
}

/// Fails for a constraint that does not compile.
pub(super) async fn check(request: &RequestContext, common: &CommonParams) -> Result<(), ApiError> {
    let Some(RequestedConstraint { constraint, field }) = &common.constraint else { return Ok(()) };
    let tried = request.router.constraints.try_out(constraint, request.peer, request.deadline).await;
    let metrics = &request.router.metrics;
    tried.map_err(|error| match error {
        TrialError::Refused(_) => ApiError::field(field, format!("'{field}' is not valid: {error}")),
        TrialError::Exceeded => {
            metrics.count_refusal(RefusalReason::ConstraintExceeded);
            ApiError::field(field, format!("'{field}' {error}; simplify it")).code("constraint_exceeded")
        }
        TrialError::Busy => {
            metrics.count_refusal(RefusalReason::ConstraintBusy);
            ApiError::overloaded(error.to_string(), 1)
        }
        TrialError::Deadline => RouteError::Deadline.into(),
        TrialError::Start(error) => ApiError::internal("check the constraint", error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn taken(body: Value) -> Result<Option<RequestedConstraint>, ApiError> {
        let body = body.to_string();
        let mut fields = Fields::parse(body.as_bytes()).unwrap();
        let constraint = take(&mut fields)?;
        fields.refuse_unknown()?;
        Ok(constraint)
    }

    #[test]
    fn every_field_gives_its_constraint() {
        let schema = json!({"type": "object"});
        let json_schema = Constraint::JsonSchema(schema.to_string());
        let format = |inner: Value| json!({"response_format": {"type": "json_schema", "json_schema": inner}});
        for (body, constraint) in [
            (format(json!({"name": "n", "schema": schema, "strict": true})), json_schema.clone()),
            (format(json!({"name": "n", "schema": schema, "description": null})), json_schema.clone()),
            (json!({"response_format": {"type": "json_object"}}), Constraint::JsonObject),
            (json!({"guided_json": schema}), json_schema.clone()),
            (json!({"guided_json": schema.to_string()}), json_schema.clone()),
            (json!({"guided_regex": "a+"}), Constraint::Regex("a+".into())),
            (json!({"guided_choice": ["a", "b"]}), Constraint::Choice(vec!["a".into(), "b".into()])),
            (json!({"guided_grammar": "start: \"a\""}), Constraint::Grammar("start: \"a\"".into())),
            (json!({"structured_outputs": {"json": schema, "regex": null}}), json_schema),
            (json!({"structured_outputs": {"json_object": true}}), Constraint::JsonObject),
            (json!({"structured_outputs": {"choice": ["a"]}}), Constraint::Choice(vec!["a".into()])),
        ] {
            assert_eq!(*taken(body.clone()).unwrap().unwrap().constraint, constraint, "{body}");
        }
        for body in [json!({"response_format": {"type": "text"}}), json!({"guided_json": null}), json!({})] {
            assert_eq!(taken(body).unwrap(), None);
        }
    }

    #[test]
    fn wrong_constraints_are_refused_by_their_path() {
        let format = |inner: Value| json!({"response_format": {"type": "json_schema", "json_schema": inner}});
        for (body, param) in [
            (json!({"response_format": {}}), "response_format.type"),
            (json!({"response_format": {"type": "structural_tag"}}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (json!({"response_format": {"type": "text", "colour": 1}}), "response_format.colour"),
            (format(json!({"name": "n"})), "response_format.json_schema.schema"),
            (format(json!({"name": "n", "schema": 7})), "response_format.json_schema.schema"),
            (format(json!({"name": "n", "schema": {}, "stirct": true})), "response_format.json_schema.stirct"),
            (json!({"guided_json": "a"}), "guided_json"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_choice": vec!["a"; CHOICES_MAX + 1]}), "guided_choice"),
            (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
            (json!({"guided_regex": "a".repeat(CONSTRAINT_BYTES_MAX + 1)}), "guided_regex"),
            (json!({"structured_outputs": {"whitespace_pattern": "a"}}), "whitespace_pattern"),
        ] {
            assert_eq!(taken(body.clone()).unwrap_err().body.param.as_deref(), Some(param), "{body}");
        }
    }
}
