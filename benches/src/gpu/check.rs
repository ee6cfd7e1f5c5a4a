//! Comparisons of results with their references.
//!
//! Invariant: a [`Verified`] exists only after a comparison without difference. The report takes
//! one for each figure.

use anyhow::{Result, ensure};
use bytemuck::Pod;

/// Proof that results agree with their reference.
#[derive(Debug, Clone, Copy)]
pub struct Verified(());

/// Compares results with references.
#[derive(Debug, Clone, Copy)]
pub struct Checker {
    /// Changes one value of every reference, so that each comparison must fail.
    pub damage: bool,
}

impl Checker {
    /// Compares bit by bit.
    pub fn same<T: Pod>(self, name: &str, found: &[T], expected: &[T]) -> Result<Verified> {
        let mut expected: Vec<u8> = bytemuck::cast_slice::<T, u8>(expected).to_vec();
        if let Some(byte) = expected.first_mut().filter(|_| self.damage) {
            *byte ^= 1;
        }
        let found: &[u8] = bytemuck::cast_slice(found);
        ensure!(!found.is_empty(), "{name}: a comparison of nothing");
        ensure!(found.len() == expected.len(), "{name}: {} bytes, not {}", found.len(), expected.len());
        let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        ensure!(differs.is_none(), "{name}: byte {} of {} is wrong", differs.unwrap_or(0), found.len());
        Ok(Verified(()))
    }

    /// Compares within `tolerance` times the reference, with 0.1 for smaller references.
    pub fn close(self, name: &str, found: &[f32], expected: &[f32], tolerance: f32) -> Result<Verified> {
        ensure!(!found.is_empty(), "{name}: a comparison of nothing");
        ensure!(found.len() == expected.len(), "{name}: {} values, not {}", found.len(), expected.len());
        for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let expected = if self.damage && index == 0 { expected + 1.0 } else { expected };
            let error = (found - expected).abs();
            let is_close = error <= tolerance * (expected.abs() + 0.1);
            ensure!(is_close, "{name}: value {index} is {found}, not {expected}");
        }
        Ok(Verified(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECKER: Checker = Checker { damage: false };

    #[test]
    fn differences_lengths_and_nan_are_found() {
        assert!(CHECKER.same("a", &[1_u32, 2], &[1, 2]).is_ok());
        assert!(CHECKER.same("a", &[1_u32, 2], &[1, 3]).is_err());
        assert!(CHECKER.same("a", &[1_u32], &[1, 2]).is_err());
        assert!(CHECKER.same::<u32>("a", &[], &[]).is_err());
        assert!(CHECKER.close("a", &[1.0, 2.0], &[1.001, 2.0], 0.01).is_ok());
        assert!(CHECKER.close("a", &[1.0, 2.1], &[1.0, 2.0], 0.01).is_err());
        assert!(CHECKER.close("a", &[f32::NAN], &[1.0], 0.01).is_err());
        assert!(CHECKER.close("a", &[1.0], &[f32::NAN], 0.01).is_err());
    }

    #[test]
    fn damage_fails_every_comparison() {
        let checker = Checker { damage: true };
        assert!(checker.same("a", &[1_u32, 2], &[1, 2]).is_err());
        assert!(checker.close("a", &[1.0], &[1.0], 0.01).is_err());
    }
}
