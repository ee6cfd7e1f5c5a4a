//! Launchers refuse shapes that disagree with their slices.

use crate::support::Emulated;
use larder_kernels::cpu::{AttentionShape, EightBit};
use larder_kernels::device::{DeviceError, Slice};
use larder_kernels::launch::{
    Add, Argmax, Arithmetic, Attention, BytePlanes, DevicePages, Element, Embedding, KvRows, MatMul, QuantisedPages,
    RmsNorm, Rotate, Sample, SiluMul,
};

fn is_refused(result: Result<(), DeviceError>) -> bool {
    matches!(result, Err(DeviceError::Shape(_)))
}

#[test]
fn rows_longer_than_their_slices_are_refused() {
    let gpu = Emulated::new();
    let (short, long): (Slice, Slice) = (gpu.empty::<u32>(11).unwrap(), gpu.empty::<u64>(4096).unwrap());
    let (element, stream) = (Element::F32, gpu.stream());
    let norm = |x, weight, out, residual| {
        RmsNorm { element, rows: 3, width: 4, x, residual, weight, eps: 0.0, out }.launch(stream)
    };
    assert!(is_refused(norm(&short, &long, &long, None)) && is_refused(norm(&long, &long, &short, None)));
    assert!(is_refused(norm(&long, &long, &long, Some(&short))));
    let huge =
        RmsNorm { rows: usize::MAX, element, width: 4, x: &long, residual: None, weight: &long, eps: 0.0, out: &long };
    assert!(is_refused(huge.launch(stream)));
    assert!(is_refused(SiluMul { element, rows: 3, width: 2, gate_up: &short, out: &long }.launch(stream)));
    assert!(is_refused(Add { element, count: 12, x: &long, y: &short }.launch(stream)));
    let product = |x, weight, bias, out| {
        let arithmetic = Arithmetic::Plain;
        MatMul { arithmetic, element, rows: 3, inputs: 4, outputs: 12, x, weight, bias, out }.launch(stream)
    };
    assert!(is_refused(product(&short, &long, None, &long)) && is_refused(product(&long, &short, None, &long)));
    assert!(is_refused(product(&long, &long, Some(&short), &long)) && is_refused(product(&long, &long, None, &short)));
    let tensor = |element, inputs, x| {
        let (arithmetic, weight, out) = (Arithmetic::Tensor, &long, &long);
        MatMul { arithmetic, element, rows: 3, inputs, outputs: 12, x, weight, bias: None, out }.launch(stream)
    };
    assert!(is_refused(tensor(Element::F16, 8, &long)) && is_refused(tensor(Element::Bf16, 12, &long)));
    assert!(is_refused(tensor(Element::Bf16, 8, &long.slice(8..4096).unwrap())));
    let misaligned = long.slice(2..4096).unwrap();
    assert!(is_refused(Add { element, count: 12, x: &misaligned, y: &long }.launch(stream)));
    let embedding = |table, tokens| Embedding {
        element,
        table_element: element,
        vocab: 3,
        width: 4,
        rows: 12,
        table,
        tokens,
        out: &long,
    };
    assert!(is_refused(embedding(&short, &long).launch(stream)) && is_refused(embedding(&long, &short).launch(stream)));
    assert!(is_refused(Argmax { element, rows: 3, vocab: 4, logits: &short, out: &long }.launch(stream)));
    let sample =
        |vocab, weights| Sample { element, rows: 3, vocab, logits: &long, parameters: &long, weights, out: &long };
    assert!(is_refused(sample(4, &short).launch(stream)));
    assert!(is_refused(sample((1 << 18) + 1, &long).launch(stream)));
    let planes = BytePlanes { pieces: 2, count: 12, elements: &long, planes: &short };
    assert!(is_refused(planes.split(stream)) && is_refused(planes.merge(stream)));
    // Nothing to do is not an error, and launches nothing.
    assert_eq!(Add { element, count: 0, x: &short, y: &short }.launch(stream), Ok(()));
}

#[test]
fn pages_that_do_not_hold_their_heads_are_refused() {
    let gpu = Emulated::new();
    let long = gpu.empty::<u64>(4096).unwrap();
    let (element, stream) = (Element::F32, gpu.stream());
    let pages = |page_elements, token_stride| DevicePages {
        element,
        pool: &long,
        page_elements,
        page_tokens: 4,
        starts: &long,
        token_stride,
    };
    let attention = |head_dim, pages| Attention {
        arithmetic: Arithmetic::Plain,
        element,
        shape: AttentionShape { heads: 2, kv_heads: 1, head_dim, scale: 1.0 },
        rows: 2,
        queries: &long,
        query_stride: 2 * head_dim,
        sequences: &long,
        sequence_count: 1,
        tiles: &long,
        tile_count: 0,
        pages,
        page_table: &long,
        page_entries: 4,
        out: &long,
    };
    assert_eq!(attention(8, pages(64, 8)).prefill(stream), Ok(()), "no tiles");
    assert!(is_refused(attention(12, pages(128, 12)).prefill(stream)), "not whole packs");
    assert!(is_refused(attention(136, pages(2048, 136)).prefill(stream)), "too large");
    let one_tile = |pages| Attention { tile_count: 1, ..attention(8, pages) };
    assert!(is_refused(one_tile(pages(31, 8)).prefill(stream)), "tokens beyond the page");
    assert!(is_refused(one_tile(pages(64, 9)).prefill(stream)), "tokens between packs");
    let tensor = Attention { arithmetic: Arithmetic::Tensor, ..one_tile(pages(64, 8)) };
    assert!(is_refused(tensor.prefill(stream)) && is_refused(tensor.split(stream, 1, &long)), "pages of f32");
    let short = gpu.empty::<f32>(39).unwrap();
    assert!(is_refused(attention(8, pages(64, 8)).split(stream, 1, &short)), "working memory of 40");
    let rotate = Rotate {
        element,
        rows: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 7,
        qkv: &long,
        row_stride: 21,
        table: &long,
        query_norm: None,
        key_norm: None,
        eps: 0.0,
        target: None,
    };
    assert!(is_refused(rotate.launch(stream)), "odd head");
    assert!(is_refused(Rotate { head_dim: 8, ..rotate }.launch(stream)), "row shorter than its heads");
    let few = gpu.empty::<u32>(11).unwrap();
    let rows =
        |head_dim, pages, slots| KvRows { pages, rows: 12, kv_heads: 1, head_dim, slots, out: &long }.launch(stream);
    assert!(is_refused(rows(6, pages(64, 8), &long)), "not whole packs");
    assert!(is_refused(rows(8, pages(64, 8), &few)), "fewer slots than rows");
    let quantised = QuantisedPages {
        format: EightBit::Int8,
        element,
        page_count: 1,
        page_elements: 40,
        page_tokens: 1,
        head_dim: 8,
        token_stride: 8,
        heads: 1,
        starts: &long,
        pages: &short,
        scales: &long,
        codes: &long,
    };
    assert!(is_refused(quantised.quantise(stream)) && is_refused(quantised.dequantise(stream)));
}
