//! Rotary position embedding in the layout of Hugging Face: element `i` of a head rotates with
//! element `i + head_dim / 2`.

/// Rule that derives the rotation speed of an element pair from its index in the head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rope {
    /// `theta^(-2i / head_dim)` radians per position.
    Default { theta: f32 },
    /// The default speed, divided by `factor`.
    Linear { theta: f32, factor: f32 },
    /// Llama 3: divides the speed of slow pairs by `factor`, keeps that of fast pairs, and
    /// interpolates in between.
    Llama3 {
        theta: f32,
        factor: f32,
        /// Pairs with fewer rotations than this in `original_context` positions are slow.
        low_freq_factor: f32,
        /// Pairs with more rotations than this in `original_context` positions are fast.
        high_freq_factor: f32,
        /// Context length of the first training phase, in tokens.
        original_context: f32,
    },
}

impl Rope {
    /// Returns the rotation speed of each of the `head_dim / 2` pairs, in radians per position.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let theta = match *self {
            Rope::Default { theta } | Rope::Linear { theta, .. } | Rope::Llama3 { theta, .. } => theta,
        };
        let pairs = head_dim / 2;
        (0..pairs).map(|i| self.scaled(1.0 / theta.powf((2 * i) as f32 / head_dim as f32))).collect()
    }

    fn scaled(&self, frequency: f32) -> f32 {
        match *self {
            Rope::Default { .. } => frequency,
            Rope::Linear { factor, .. } => frequency / factor,
            Rope::Llama3 { factor, low_freq_factor, high_freq_factor, original_context, .. } => {
                let rotations = original_context * frequency / std::f32::consts::TAU;
                if rotations < low_freq_factor {
                    return frequency / factor;
                }
                if rotations > high_freq_factor {
                    return frequency;
                }
                let fast = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - fast) * frequency / factor + fast * frequency
            }
        }
    }
}

/// Cosines and sines for the rows of a batch. Computed once per batch, used by every layer and
/// head.
#[derive(Debug, Default)]
pub struct RopeTable {
    pairs: usize,
    /// Per row: the cosines of all pairs, then the sines.
    values: Vec<f32>,
}

impl RopeTable {
    /// Replaces the content by the values for rows at `positions`. Keeps the allocation.
    pub fn fill(&mut self, frequencies: &[f32], positions: impl Iterator<Item = usize>) {
        self.pairs = frequencies.len();
        self.values.clear();
        for position in positions {
            let angles = frequencies.iter().map(|f| position as f32 * f);
            self.values.extend(angles.clone().map(f32::cos));
            self.values.extend(angles.map(f32::sin));
        }
    }

    /// The table in row-major order: the cosines of a row's pairs, then the sines.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Rotates one head (`[head_dim]`) of row `row` in place.
    ///
    /// # Panics
    /// If the table has no such row.
    #[inline]
    pub fn apply(&self, row: usize, head: &mut [f32]) {
        let table = &self.values[2 * row * self.pairs..2 * (row + 1) * self.pairs];
        let (cos, sin) = table.split_at(self.pairs);
        let (first, second) = head.split_at_mut(self.pairs);
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_rotate_by_position_times_frequency() {
        let rope = Rope::Default { theta: 100.0 };
        let frequencies = rope.frequencies(4);
        assert!((frequencies[0] - 1.0).abs() < 1e-7 && (frequencies[1] - 0.1).abs() < 1e-7);
        let mut table = RopeTable::default();
        table.fill(&frequencies, [0, 3].into_iter());
        let mut head = [1.0, 2.0, 3.0, 4.0];
        table.apply(0, &mut head);
        assert_eq!(head, [1.0, 2.0, 3.0, 4.0]);
        table.apply(1, &mut head);
        let (s, c) = 3.0f32.sin_cos();
        let (t, d) = 0.3f32.sin_cos();
        let expected = [c - 3.0 * s, 2.0 * d - 4.0 * t, 3.0 * c + s, 4.0 * d + 2.0 * t];
        assert!(head.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{head:?} {expected:?}");
    }

    #[test]
    fn llama3_scales_slow_pairs_and_keeps_fast_pairs() {
        let (factor, low, high, original_context) = (8.0, 1.0, 4.0, 32.0);
        let plain = Rope::Default { theta: 1e4 }.frequencies(16);
        let llama3 =
            Rope::Llama3 { theta: 1e4, factor, low_freq_factor: low, high_freq_factor: high, original_context };
        let mut bands = [0; 3];
        for (scaled, plain) in llama3.frequencies(16).into_iter().zip(plain) {
            let rotations = original_context * plain / std::f32::consts::TAU;
            let band = usize::from(rotations > low) + usize::from(rotations > high);
            bands[band] += 1;
            match band {
                0 => assert_eq!(scaled, plain / factor),
                1 => assert!(scaled > plain / factor && scaled < plain),
                _ => assert_eq!(scaled, plain),
            }
        }
        assert!(bands.iter().all(|&n| n > 0), "{bands:?}");
        assert_eq!(Rope::Linear { theta: 1e4, factor: 2.0 }.frequencies(4)[0], 0.5);
    }
}
