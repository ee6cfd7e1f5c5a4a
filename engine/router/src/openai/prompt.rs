//! Field `prompt` of `/v1/completions`.

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use std::fmt;

/// Maximum number of prompts in one request.
pub const PROMPTS_MAX: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

impl PromptInput {
    pub fn bytes(&self) -> usize {
        match self {
            PromptInput::Text(text) => text.len(),
            PromptInput::Tokens(tokens) => tokens.len() * size_of::<u32>(),
        }
    }
}

/// Field `prompt`: a string, a list of token ids, or a list of such prompts.
pub(super) struct Prompts(pub(super) Vec<PromptInput>);

/// Element of a list in the field `prompt`.
enum PromptItem {
    Id(u32),
    Prompt(PromptInput),
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids, or a list of those")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![PromptInput::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
        let mut ids = Vec::new();
        let mut prompts = Vec::new();
        while let Some(item) = items.next_element()? {
            match item {
                PromptItem::Id(id) => ids.push(id),
                PromptItem::Prompt(prompt) => prompts.push(prompt),
            }
            if prompts.len() > PROMPTS_MAX {
                return Err(A::Error::custom(format!("more than {PROMPTS_MAX} prompts")));
            }
            if !ids.is_empty() && !prompts.is_empty() {
                return Err(A::Error::custom("a list of both token ids and prompts"));
            }
        }
        Ok(Prompts(if prompts.is_empty() { vec![PromptInput::Tokens(ids)] } else { prompts }))
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = PromptItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id, or a list of token ids")
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<PromptItem, E> {
        u32::try_from(id).map(PromptItem::Id).map_err(|_| E::custom(format!("{id} is not a token id")))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PromptItem, E> {
        Ok(PromptItem::Prompt(PromptInput::Text(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PromptItem, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = items.next_element()? {
            ids.push(id);
        }
        Ok(PromptItem::Prompt(PromptInput::Tokens(ids)))
    }
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}
