//! Sizes of L1 and L2 that follow from the model and from the free memory of the machine.
//!
//! The figures are defaults. Operators who start several engines or nodes on one machine give each
//! its sizes, because none of them can know how far the others will grow.

use bytesize::ByteSize;
use larder_memory::machine;
use larder_model::Model;

/// Sequences of full length for which L1 has room at most, by default. Free memory beyond that
/// serves other programs better.
const FULL_SEQUENCES_MAX: u64 = 16;
/// Default of L1 at most, if [`FULL_SEQUENCES_MAX`] sequences take less. So the bundled model can
/// serve many clients.
const L1_BYTES_LEAST_CAP: u64 = 128 << 20;
/// Default of L2 at most, if the engines have less L1.
const L2_BYTES_LEAST_CAP: u64 = 256 << 20;
/// Minimum default of L1. With less, a message would name an option that was not given.
const L1_BYTES_MIN: u64 = 64 << 20;
/// Minimum of L2, which the node accepts too.
pub const L2_BYTES_MIN: u64 = 32 << 20;
/// Free memory to assume where the kernel does not tell.
const UNKNOWN_BYTES: u64 = 1 << 30;

/// Sizes of the pages of a model.
#[derive(Debug, Clone, Copy)]
pub struct ModelShape {
    pub page_tokens: u32,
    page_bytes: u64,
    /// Maximum tokens of a sequence, if L1 has room.
    context_tokens: u64,
}

impl ModelShape {
    pub fn new(model: &Model, page_tokens: u32) -> Self {
        Self {
            page_tokens,
            // An engine refuses 0 tokens, with its own message.
            page_bytes: model.geometry(page_tokens.max(1)).page_bytes() as u64,
            context_tokens: model.config().max_context as u64,
        }
    }

    /// L1 that holds one sequence of full length.
    fn full_context_bytes(self) -> u64 {
        self.context_tokens.div_ceil(u64::from(self.page_tokens.max(1))).saturating_mul(self.page_bytes)
    }

    fn l1_cap(self) -> u64 {
        self.full_context_bytes().saturating_mul(FULL_SEQUENCES_MAX).max(L1_BYTES_LEAST_CAP)
    }

    /// Describes the context of an engine that has room for `max_context` tokens. Tells what to
    /// change if the model could have more.
    pub fn context_text(self, max_context: u32) -> String {
        if u64::from(max_context) >= self.context_tokens {
            return format!("{max_context} tokens");
        }
        let needed = self.full_context_bytes().div_ceil(1 << 20);
        format!("{max_context} of the model's {} tokens; `--l1 {needed}MiB` has room for all", self.context_tokens)
    }

    pub fn page_text(self) -> String {
        format!("pages of {} tokens ({:.1})", self.page_tokens, ByteSize(self.page_bytes))
    }
}

/// Bytes of L1 of an engine that is alone on its machine: half of the free memory. The rest is for
/// workspaces, requests, and pages on their way to the store.
pub fn l1_alone(shape: ModelShape) -> u64 {
    (free_bytes() / 2).max(L1_BYTES_MIN).min(shape.l1_cap())
}

/// Sizes of the parts of `up`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// L1 of each of the two engines.
    pub l1: u64,
    /// L2 of each node.
    pub l2: u64,
}

impl Sizes {
    /// Chooses the sizes that `l1` and `l2` leave open. Call it when the weights are in memory.
    pub fn for_up(shape: ModelShape, nodes: u16, l1: Option<ByteSize>, l2: Option<ByteSize>) -> Self {
        Self::within(free_bytes(), shape.l1_cap(), u64::from(nodes), l1.map(|l1| l1.as_u64()), l2.map(|l2| l2.as_u64()))
    }

    /// Divides three quarters of `free` among two engines and the nodes.
    fn within(free: u64, l1_cap: u64, nodes: u64, l1: Option<u64>, l2: Option<u64>) -> Self {
        let budget = free / 4 * 3;
        let of_engine = match l2 {
            None => budget / 3,
            Some(l2) => budget.saturating_sub(l2.saturating_mul(nodes)) / 2,
        };
        let l1 = l1.unwrap_or(of_engine.max(L1_BYTES_MIN).min(l1_cap));
        let both = l1.saturating_mul(2);
        let of_nodes = budget.saturating_sub(both).min(both.max(L2_BYTES_LEAST_CAP));
        Self { l1, l2: l2.unwrap_or((of_nodes / nodes.max(1)).max(L2_BYTES_MIN)) }
    }
}

fn free_bytes() -> u64 {
    machine::available().map_or(UNKNOWN_BYTES, |memory| memory.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    /// Qwen3-0.6B in bf16: 112 KiB per token.
    const QWEN: ModelShape = ModelShape { page_tokens: 16, page_bytes: (16 * 112) << 10, context_tokens: 40_960 };

    #[test]
    fn engines_and_nodes_share_three_quarters_of_the_free_memory() {
        let sizes = Sizes::within(8 * GIB, QWEN.l1_cap(), 1, None, None);
        assert_eq!(sizes, Sizes { l1: 2 * GIB, l2: 2 * GIB });
        let four = Sizes::within(8 * GIB, QWEN.l1_cap(), 4, None, None);
        assert_eq!(four, Sizes { l1: 2 * GIB, l2: GIB / 2 });
        assert!(sizes.l1 / QWEN.page_bytes * 16 >= 8192, "8 k tokens on a machine of 8 GB");
    }

    #[test]
    fn given_sizes_leave_the_rest_to_the_others() {
        let of = |l1, l2| Sizes::within(8 * GIB, QWEN.l1_cap(), 1, l1, l2);
        assert_eq!(of(Some(GIB), None), Sizes { l1: GIB, l2: 2 * GIB });
        assert_eq!(of(None, Some(4 * GIB)), Sizes { l1: GIB, l2: 4 * GIB });
        assert_eq!(of(Some(7 * GIB), None), Sizes { l1: 7 * GIB, l2: L2_BYTES_MIN });
        assert_eq!(of(Some(7 * GIB), Some(9 * GIB)), Sizes { l1: 7 * GIB, l2: 9 * GIB });
        assert_eq!(of(None, Some(9 * GIB)), Sizes { l1: L1_BYTES_MIN, l2: 9 * GIB });
    }

    #[test]
    fn small_model_takes_little_of_a_large_machine() {
        let tiny = ModelShape { page_tokens: 32, page_bytes: 48 << 10, context_tokens: 4096 };
        let sizes = Sizes::within(1024 * GIB, tiny.l1_cap(), 1, None, None);
        assert_eq!(sizes, Sizes { l1: 128 * MIB, l2: 256 * MIB });
    }

    #[test]
    fn short_context_tells_how_to_get_the_rest() {
        assert_eq!(QWEN.context_text(40_960), "40960 tokens");
        let text = QWEN.context_text(8192);
        assert_eq!(text, "8192 of the model's 40960 tokens; `--l1 4480MiB` has room for all");
        assert_eq!(QWEN.page_text(), "pages of 16 tokens (1.8 MiB)");
    }
}
