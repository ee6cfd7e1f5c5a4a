//! `POST /tokenize` and `POST /detokenize`, as vLLM and SGLang have them.

use super::answer::Endpoint;
use super::errors::ApiError;
use super::fields::{BoundedList, Fields, TextOrList};
use super::messages::take_messages;
use super::prepare::{self, PromptRules};
use super::prompt::{PROMPTS_MAX, PromptInput};
use super::tools::take_tools;
use super::types::take_render_options;
use super::whole::charged_body;
use super::{ApiCall, PROMPT_CHARGE_BYTES, chat};
use crate::models::ServedModel;
use axum::response::Response;
use larder_model::{ChatMessage, RenderOptions};
use serde_json::json;

/// Maximum number of tokens of a request to `/detokenize`, and of an answer of `/tokenize`.
const TOKENS_MAX: usize = 1 << 20;
/// Maximum size in bytes of the text in an answer of `/detokenize`.
const DECODED_BYTES_MAX: usize = 16 << 20;
/// Memory of an answer of `/detokenize`, in sizes of its text: the text, two values in JSON, and
/// the body, which escapes them.
const DECODED_COPIES: usize = 7;
/// Memory of a returned token, as a multiple of that in the request of a choice: a JSON value, and
/// its text.
const TOKEN_CHARGES: u32 = 16;

enum Input {
    Prompts { texts: Vec<String>, is_list: bool },
    Chat { messages: Vec<ChatMessage>, render: RenderOptions },
}

struct TokenizeRequest {
    model: Option<String>,
    input: Input,
    add_special_tokens: Option<bool>,
    with_texts: bool,
}

impl TokenizeRequest {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let prompt: Option<TextOrList<String, PROMPTS_MAX>> = fields.take("prompt")?;
        let messages = take_messages(&mut fields)?;
        let input = match (prompt, messages) {
            (Some(TextOrList::Text(text)), None) => Input::Prompts { texts: vec![text], is_list: false },
            (Some(TextOrList::List(texts)), None) => Input::Prompts { texts, is_list: true },
            (None, Some(messages)) => {
                let tools = take_tools(&mut fields)?.map(|tools| tools.list);
                Input::Chat { messages, render: RenderOptions { tools, ..take_render_options(&mut fields)? } }
            }
            _ => return Err(ApiError::field("prompt", "give exactly one of 'prompt' and 'messages'")),
        };
        let request = Self {
            model: fields.take("model")?,
            input,
            add_special_tokens: fields.take("add_special_tokens")?,
            with_texts: fields.take("return_token_strs")?.unwrap_or(false),
        };
        fields.refuse_unknown()?;
        Ok(request)
    }
}

pub(super) async fn tokenize(call: ApiCall) -> Response {
    call.serve("tokenize", async |mut request, body, record| {
        let router = request.router.clone();
        let TokenizeRequest { model, input, add_special_tokens, with_texts } =
            request.parse(body, TokenizeRequest::parse).await?;
        let model = prepare::find_model_or_only(&request, model.as_deref()).await?;
        let _place = prepare::admit(&request, 1, 1)?;
        let context = prepare::context(&request, &model)?;
        let (texts, is_list, add_special) = match input {
            Input::Prompts { texts, is_list } => (texts, is_list, add_special_tokens.unwrap_or(true)),
            Input::Chat { messages, render } => {
                let rendered = chat::text(&request, &model, messages, render, context).await?;
                request.text = rendered.charge;
                (vec![rendered.text], false, add_special_tokens.unwrap_or(false))
            }
        };
        let inputs = texts.into_iter().map(PromptInput::Text).collect();
        let rules = PromptRules {
            endpoint: Endpoint::Completion,
            context,
            add_special,
            truncate: None,
            echo: false,
            echo_offsets: false,
        };
        let prompts = prepare::prompts(&mut request, rules, &model, inputs).await?;
        let tokens: Vec<_> = prompts.into_iter().map(|prompt| prompt.tokens).collect();
        let counts: Vec<usize> = tokens.iter().map(Vec::len).collect();
        let total: usize = counts.iter().sum();
        if total > TOKENS_MAX {
            let message = format!("the texts have {total} tokens; at most {TOKENS_MAX} are returned at once");
            return Err(ApiError::field("prompt", message));
        }
        let charges = prepare::charges(Endpoint::Completion, &counts, TOKEN_CHARGES)?;
        let peer = request.peer;
        let charges: Result<Vec<_>, _> =
            charges.into_iter().map(|units| prepare::charge(&router, peer, units)).collect();
        let charges = charges?;
        // Not on the event loop: a million tokens take a while.
        let tokenizer = model.tokenizer.clone();
        let write = move || {
            let texts: Option<Vec<Vec<String>>> =
                with_texts.then(|| tokens.iter().map(|tokens| token_texts(&model, tokens)).collect());
            let mut answer = match is_list {
                true => json!({"count": counts, "tokens": tokens, "token_strs": texts}),
                false => {
                    json!({"count": counts[0], "tokens": tokens[0], "token_strs": texts.map(|mut texts| texts.remove(0))})
                }
            };
            answer["max_model_len"] = json!(context);
            answer.to_string().into_bytes()
        };
        let bytes = total * size_of::<u32>();
        let written = tokio::time::timeout_at(request.deadline, router.tokeniser.run(request.peer, (&tokenizer, bytes), write));
        let written = written.await.map_err(|_| ApiError::from(crate::route::RouteError::Deadline))?;
        let json = written.map_err(|error| ApiError::internal("write the tokens", error))?;
        end(record);
        Ok(charged_body(json, charges))
    })
    .await
}

fn token_texts(model: &ServedModel, tokens: &[u32]) -> Vec<String> {
    let text = |&id: &u32| String::from_utf8_lossy(&model.tokenizer.token_bytes(id)).into_owned();
    tokens.iter().map(text).collect()
}

struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
    skip_special_tokens: bool,
}

impl DetokenizeRequest {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let BoundedList::<u32, TOKENS_MAX>(tokens) = fields.require("tokens")?;
        let skip_special_tokens = fields.take("skip_special_tokens")?.unwrap_or(true);
        let request = Self { model: fields.take("model")?, tokens, skip_special_tokens };
        fields.refuse_unknown()?;
        Ok(request)
    }
}

pub(super) async fn detokenize(call: ApiCall) -> Response {
    call.serve("detokenize", async |mut request, body, record| {
        let router = request.router.clone();
        let DetokenizeRequest { model, tokens, skip_special_tokens } =
            request.parse(body, DetokenizeRequest::parse).await?;
        let model = prepare::find_model_or_only(&request, model.as_deref()).await?;
        let _place = prepare::admit(&request, 1, 1)?;
        let (tokenizer, peer) = (model.tokenizer.clone(), request.peer);
        let bytes = tokens.len() * size_of::<u32>();
        let decode = {
            let (router, tokenizer) = (router.clone(), tokenizer.clone());
            move || {
                // Before the text is made: a token of two digits may stand for kilobytes.
                let text_bytes: usize = tokens.iter().map(|&id| tokenizer.token_bytes(id).len()).sum();
                let charge = prepare::charge(&router, peer, text_units(text_bytes)?)?;
                let text = match skip_special_tokens {
                    true => tokenizer.decode(&tokens),
                    false => tokenizer.decode_all(&tokens),
                };
                // The names in vLLM and in SGLang.
                Ok::<_, ApiError>((json!({"prompt": text, "text": text}).to_string().into_bytes(), charge))
            }
        };
        let decoded =
            tokio::time::timeout_at(request.deadline, router.tokeniser.run(peer, (&tokenizer, bytes), decode));
        let decoded = decoded.await.map_err(|_| ApiError::from(crate::route::RouteError::Deadline))?;
        let (json, charge) = decoded.map_err(|error| ApiError::internal("decode the tokens", error))??;
        end(record);
        Ok(charged_body(json, charge))
    })
    .await
}

/// Charge of an answer whose text has `bytes` bytes, in units of [`PROMPT_CHARGE_BYTES`].
///
/// # Errors
/// 400 above [`DECODED_BYTES_MAX`].
fn text_units(bytes: usize) -> Result<usize, ApiError> {
    if bytes > DECODED_BYTES_MAX {
        let message = format!("the text has {bytes} bytes; at most {DECODED_BYTES_MAX} are returned at once");
        return Err(ApiError::field("tokens", message));
    }
    Ok((bytes * DECODED_COPIES).div_ceil(PROMPT_CHARGE_BYTES))
}

fn end(record: &mut Option<crate::metrics::RequestRecord>) {
    if let Some(record) = record.take() {
        record.end(200);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_of_few_tokens_are_charged_and_bounded() {
        assert_eq!(text_units(0).unwrap(), 0);
        let most = text_units(DECODED_BYTES_MAX).unwrap();
        assert_eq!(most * PROMPT_CHARGE_BYTES, DECODED_BYTES_MAX * DECODED_COPIES);
        let error = text_units(DECODED_BYTES_MAX + 1).unwrap_err();
        assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some("tokens")));
    }
}
