//! Token counts of an answer.

use super::types::Usage;
use crate::metrics::RequestRecord;
use crate::route::CachedTokens;
use serde_json::{Value, json};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UsageTotals {
    prompt_tokens: Vec<u32>,
    /// Per prompt, the minimum over its choices. A later choice may find pages cached that an
    /// earlier one computed.
    cached_tokens: Vec<Option<CachedTokens>>,
    completion_tokens: u32,
    choices_each: u32,
}

impl UsageTotals {
    pub(crate) fn new(prompt_tokens: Vec<u32>, choices_each: u32) -> Self {
        let cached_tokens = vec![None; prompt_tokens.len()];
        Self { prompt_tokens, cached_tokens, completion_tokens: 0, choices_each: choices_each.max(1) }
    }

    /// Tokens of the prompt of each choice, in the order of their indexes.
    pub(crate) fn prompt_tokens(&self) -> impl Iterator<Item = u32> {
        self.prompt_tokens.iter().flat_map(|&tokens| std::iter::repeat_n(tokens, self.choices_each as usize))
    }

    pub(crate) fn add(&mut self, index: u32, completion_tokens: u32, cached_tokens: CachedTokens) {
        self.completion_tokens = self.completion_tokens.saturating_add(completion_tokens);
        if let Some(least) = self.cached_tokens.get_mut((index / self.choices_each) as usize) {
            *least = Some(
                least.map_or(cached_tokens, |l| if cached_tokens.total() < l.total() { cached_tokens } else { l }),
            );
        }
    }

    /// Sums for the field `usage`. Saturates: the numbers come from engines.
    pub(crate) fn usage(&self) -> Usage {
        let sum = |numbers: &mut dyn Iterator<Item = u32>| numbers.fold(0, u32::saturating_add);
        let cached = sum(&mut self.cached_tokens.iter().flatten().map(CachedTokens::total));
        Usage::new(sum(&mut self.prompt_tokens.iter().copied()), self.completion_tokens, cached)
    }

    /// Sources of the cached tokens, as SGLang reports them: memory of the engine, DRAM and NVMe of
    /// the store.
    pub(crate) fn sglext(&self) -> Value {
        let sum =
            |part: fn(&CachedTokens) -> u32| self.cached_tokens.iter().flatten().map(part).fold(0, u32::saturating_add);
        let details = json!({
            "device": sum(|cached| cached.device),
            "host": sum(|cached| cached.host),
            "storage": sum(|cached| cached.storage),
            "storage_backend": "larder",
        });
        json!({"cached_tokens_details": details})
    }

    pub(crate) fn end(&self, record: RequestRecord) {
        let usage = self.usage();
        let cached = usage.prompt_tokens_details.cached_tokens;
        record.end_with_tokens(usage.prompt_tokens, usage.completion_tokens, cached);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_counts_each_prompt_once_with_its_smallest_hit() {
        let mut usage_totals = UsageTotals::new(vec![10, 20], 2);
        for (index, cached) in [(0, 8), (1, 4), (2, 0), (3, 16)] {
            usage_totals.add(index, 5, CachedTokens { device: cached / 2, host: 0, storage: cached / 2 });
        }
        assert_eq!(usage_totals.usage(), Usage::new(30, 20, 4));
        let details = &usage_totals.sglext()["cached_tokens_details"];
        assert_eq!((details["device"].as_u64(), details["storage"].as_u64()), (Some(2), Some(2)));
    }
}
