use super::*;

const TYPES: [WeightType; 4] = [WeightType::F32, WeightType::Bf16, WeightType::F16, WeightType::Q8];

pub(super) fn values(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

pub(super) fn pack(weights: &[f32], outputs: usize, inputs: usize, weight_type: WeightType) -> PackedMatrix {
    let fill = |o: usize, row: &mut [f32]| row.copy_from_slice(&weights[o * inputs..(o + 1) * inputs]);
    PackedMatrix::new(outputs, inputs, weight_type, fill).unwrap()
}

/// The definition of a product, in plain code.
fn defined(x: &[f32], packed: &PackedMatrix, bias: &[f32]) -> Vec<u32> {
    let mut weights = vec![0.0; packed.inputs];
    let mut out = vec![0; x.len() / packed.inputs * packed.outputs];
    for output in 0..packed.outputs {
        packed.copy_row(output, &mut weights);
        for (row, x) in x.chunks_exact(packed.inputs).enumerate() {
            let sum = x.iter().zip(&weights).fold(0.0f32, |sum, (x, weight)| x.mul_add(*weight, sum));
            out[row * packed.outputs + output] = (sum + bias[output]).to_bits();
        }
    }
    out
}

#[test]
fn every_instruction_set_row_count_and_type_gives_the_bits_of_the_definition() {
    for (outputs, inputs) in [(1, 1), (50, 33), (96, 64), (145, 1100), (48, 515), (300, 31)] {
        let (weights, bias) = (values(outputs * inputs, 4), values(outputs, 6));
        let x = values(73 * inputs, 5);
        for weight_type in TYPES {
            let packed = pack(&weights, outputs, inputs, weight_type);
            let expected = defined(&x, &packed, &bias);
            for set in InstructionSet::available() {
                for rows in [1, 2, 3, 4, 5, 7, 8, 9, 15, 31, 32, 33, 64, 73] {
                    let first = (73 - rows) / 2;
                    let mut out = vec![f32::NAN; rows * outputs];
                    let x = &x[first * inputs..(first + rows) * inputs];
                    // SAFETY: the set is one of those available.
                    unsafe { matmul_with(set, x, &packed, Some(&bias), &mut out) };
                    let same = out.iter().zip(&expected[first * outputs..]).all(|(a, b)| a.to_bits() == *b);
                    assert!(same, "{set:?} {weight_type:?}: {outputs} × {inputs}, {rows} rows");
                }
            }
        }
    }
}

#[test]
fn single_row_has_the_bits_of_the_definition_in_panels_and_pairs() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    // Nine and eleven panels, so that one is left without a pair.
    for (outputs, inputs) in [(9 * PANEL, 40), (10 * PANEL + 5, 1100)] {
        let (weights, bias, x) = (values(outputs * inputs, 4), values(outputs, 6), values(inputs, 5));
        for weight_type in TYPES {
            let packed = pack(&weights, outputs, inputs, weight_type);
            let expected = defined(&x, &packed, &bias);
            for set in InstructionSet::available() {
                let together = pool.install(|| panels_per_task(set, 1, outputs.div_ceil(PANEL)));
                assert_eq!(together, if set.lanes() == 16 { 2 } else { 1 });
                let mut out = vec![f32::NAN; outputs];
                // SAFETY: the set is one of those available.
                pool.install(|| unsafe { matmul_with(set, &x, &packed, Some(&bias), &mut out) });
                let same = out.iter().zip(&expected).all(|(a, b)| a.to_bits() == *b);
                assert!(same, "{set:?} {weight_type:?}: {outputs} × {inputs}");
            }
        }
    }
}

#[test]
fn product_agrees_with_the_sum_in_f64() {
    for (rows, outputs, inputs) in [(1, 50, 2), (3, 48, 7), (65, 97, 33), (2, 320, 600), (130, 5, 1100)] {
        let (w, x) = (values(outputs * inputs, 1), values(rows * inputs, 2));
        let packed = pack(&w, outputs, inputs, WeightType::F32);
        let mut out = vec![f32::NAN; rows * outputs];
        matmul(&x, &packed, None, &mut out);
        for (index, out) in out.iter().enumerate() {
            let (r, o) = (index / outputs, index % outputs);
            let exact: f64 = (0..inputs).map(|i| f64::from(x[r * inputs + i]) * f64::from(w[o * inputs + i])).sum();
            let error = (f64::from(*out) - exact).abs();
            assert!(error < 1e-5 * (inputs as f64).sqrt(), "{rows} {outputs} {inputs}: {error}");
        }
    }
}

#[test]
fn result_does_not_depend_on_threads_and_rows_per_task() {
    let (rows, outputs, inputs) = (600, 100, 70);
    let packed = pack(&values(outputs * inputs, 1), outputs, inputs, WeightType::Bf16);
    let x = values(rows * inputs, 2);
    let expected = defined(&x, &packed, &vec![0.0; outputs]);
    for threads in [1, 2, 5, 40] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut out = vec![f32::NAN; rows * outputs];
        pool.install(|| matmul(&x, &packed, None, &mut out));
        assert!(out.iter().zip(&expected).all(|(a, b)| a.to_bits() == *b), "{threads} threads");
    }
}

#[test]
fn packing_keeps_exact_weights_and_rounds_the_others() {
    let (outputs, inputs) = (50, 70);
    let weights = values(outputs * inputs, 9);
    let halves: Vec<f32> = weights.iter().map(|w| half::bf16::from_f32(w / 1000.0).to_f32()).collect();
    let error = |weights: &[f32], weight_type: WeightType| {
        let packed = pack(weights, outputs, inputs, weight_type);
        let mut row = vec![0.0; inputs];
        let mut worst = 0.0f32;
        for (output, weights) in weights.chunks_exact(inputs).enumerate() {
            packed.copy_row(output, &mut row);
            worst = row.iter().zip(weights).fold(worst, |worst, (a, b)| worst.max((a - b).abs()));
        }
        worst
    };
    assert_eq!((error(&weights, WeightType::F32), error(&halves, WeightType::Bf16)), (0.0, 0.0));
    // Half a step: 2⁻⁹ and 2⁻¹² for values below 1, and 1/254 with a scale of 1/127.
    for (weight_type, step) in [(WeightType::Bf16, 1.0 / 512.0), (WeightType::F16, 1.0 / 4096.0)] {
        assert!((step / 2.0..=step).contains(&error(&weights, weight_type)));
    }
    let q8 = error(&weights, WeightType::Q8);
    assert!((0.003..0.00397).contains(&q8), "{q8}");
    assert_eq!(error(&vec![0.0; outputs * inputs], WeightType::Q8), 0.0);
}

#[test]
fn packing_refuses_a_matrix_larger_than_memory() {
    assert!(PackedMatrix::new(usize::MAX / 8, 1 << 20, WeightType::Bf16, |_, _| ()).is_err());
    assert!(PackedMatrix::new(1, usize::MAX / 8, WeightType::Q8, |_, _| ()).is_err());
}

#[test]
fn narrow_products_of_a_row_do_not_depend_on_other_rows_or_threads() {
    for weight_type in narrow_types() {
        for (outputs, inputs) in [(1, 1), (50, 33), (96, 64), (145, 1100), (48, 515), (600, 31)] {
            let (packed, bias) = (pack(&values(outputs * inputs, 4), outputs, inputs, weight_type), values(outputs, 6));
            let x = values(73 * inputs, 5);
            let product = |rows: Range<usize>, threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut out = vec![f32::NAN; rows.len() * outputs];
                pool.install(|| matmul(&x[rows.start * inputs..rows.end * inputs], &packed, Some(&bias), &mut out));
                out.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
            };
            let expected: Vec<u32> = (0..73).flat_map(|row| product(row..row + 1, 1)).collect();
            for (rows, threads) in [(0..73, 1), (0..73, 3), (2..4, 2), (5..8, 1), (1..5, 2), (9..16, 2), (30..62, 5)] {
                let own = &expected[rows.start * outputs..rows.end * outputs];
                assert!(product(rows.clone(), threads) == own, "{weight_type:?}: {outputs} × {inputs}, {rows:?}");
            }
        }
    }
}

#[test]
fn narrow_products_are_those_of_rounded_activations() {
    for weight_type in narrow_types() {
        for (rows, outputs, inputs) in [(1, 50, 2), (3, 48, 7), (65, 97, 33), (2, 320, 600), (130, 5, 1100)] {
            let (x, packed) =
                (values(rows * inputs, 2), pack(&values(outputs * inputs, 1), outputs, inputs, weight_type));
            let mut out = vec![f32::NAN; rows * outputs];
            matmul(&x, &packed, None, &mut out);
            let mut weights = vec![0.0; inputs];
            for (index, out) in out.iter().enumerate() {
                let (row, output) = (index / outputs, index % outputs);
                packed.copy_row(output, &mut weights);
                let row = rounded(&x[row * inputs..(row + 1) * inputs], weight_type);
                let exact: f64 = row.iter().zip(&weights).map(|(x, weight)| f64::from(*x) * f64::from(*weight)).sum();
                let error = (f64::from(*out) - exact).abs();
                assert!(error < 1e-5 * (inputs as f64).sqrt(), "{weight_type:?}: {rows} {outputs} {inputs}: {error}");
            }
        }
    }
}

/// Narrow types that this machine can multiply. Plain code multiplies the 8-bit type everywhere.
fn narrow_types() -> Vec<WeightType> {
    let types = [WeightType::Bf16Pairs, WeightType::Q8Quads];
    types.into_iter().filter(|weight_type| weight_type.is_available()).collect()
}

/// Activations as products with `weight_type` round them.
fn rounded(row: &[f32], weight_type: WeightType) -> Vec<f32> {
    if weight_type == WeightType::Bf16Pairs {
        return row.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
    }
    let of_block = |block: &[f32]| {
        let scale = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0;
        block.iter().map(|x| (x * (1.0 / scale)).round_ties_even() * scale).collect::<Vec<f32>>()
    };
    row.chunks(Q8_BLOCK).flat_map(of_block).collect()
}

#[test]
fn narrow_types_hold_the_same_weights() {
    let (outputs, inputs) = (50, 71);
    let weights = values(outputs * inputs, 9);
    for (wide, narrow) in [(WeightType::Bf16, WeightType::Bf16Pairs), (WeightType::Q8, WeightType::Q8Quads)] {
        assert!(wide.narrow().is_none_or(|found| found == narrow));
        if !narrow.is_available() {
            continue;
        }
        let [wide, narrow] = [wide, narrow].map(|weight_type| pack(&weights, outputs, inputs, weight_type));
        let [mut expected, mut row] = [(); 2].map(|()| vec![0.0; inputs]);
        for output in 0..outputs {
            wide.copy_row(output, &mut expected);
            narrow.copy_row(output, &mut row);
            assert_eq!(row, expected);
        }
    }
}

#[test]
fn narrow_products_of_a_row_that_is_not_finite_are_not_finite() {
    let (rows, outputs, inputs) = (3, 50, 75);
    for weight_type in narrow_types() {
        let packed = pack(&values(outputs * inputs, 4), outputs, inputs, weight_type);
        for hostile in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for input in [0, 31, 40, 74] {
                let mut x = values(rows * inputs, 5);
                x[inputs + input] = hostile;
                let mut out = vec![0.0; rows * outputs];
                matmul(&x, &packed, None, &mut out);
                let finite: Vec<bool> =
                    out.chunks_exact(outputs).map(|row| row.iter().all(|x| x.is_finite())).collect();
                assert_eq!(finite, [true, false, true], "{weight_type:?}: {hostile} as input {input}");
                assert!(out[outputs..2 * outputs].iter().all(|x| !x.is_finite()), "{weight_type:?}: {hostile}");
            }
        }
    }
}
