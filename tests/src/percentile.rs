//! Percentiles of what was measured.

use std::fmt;
use std::time::Duration;

/// The value below which so many per cent of these lie; 0 if there is none.
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = ((percent / 100.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(at.max(1) - 1).copied().unwrap_or(0.0)
}

/// The median of what was measured, with the least and the most. Shown as `1.5 (1.0–2.0)`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    /// Of these, in any order.
    pub fn of(values: &[f64]) -> Spread {
        let [least, median, most] = [0.0, 50.0, 100.0].map(|percent| percentile(values, percent));
        Spread { median, least, most }
    }

    /// Of times, in milliseconds.
    pub fn of_ms(times: impl IntoIterator<Item = Duration>) -> Spread {
        Spread::of(&times.into_iter().map(|time| time.as_secs_f64() * 1e3).collect::<Vec<_>>())
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} ({:.digits$}–{:.digits$})", self.median, self.least, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!([50.0, 99.0, 100.0, 0.0].map(|percent| percentile(&values, percent)), [2.0, 4.0, 4.0, 1.0]);
        assert_eq!(percentile(&[], 50.0), 0.0);
        assert_eq!(format!("{:.1}", Spread::of(&values)), "2.0 (1.0–4.0)");
    }
}
