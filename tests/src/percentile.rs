//! Percentiles of what was measured.

/// The value below which so many per cent of these lie; 0 if there is none.
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = ((percent / 100.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(at.max(1) - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!([50.0, 99.0, 100.0, 0.0].map(|percent| percentile(&values, percent)), [2.0, 4.0, 4.0, 1.0]);
        assert_eq!(percentile(&[], 50.0), 0.0);
    }
}
