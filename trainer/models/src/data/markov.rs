//! Generated text whose entropy is known. So the loss of a perfect model is known, and a loss can be compared with it.
//!
//! Four tokens may follow a token, with probabilities 1/2, 1/4, 1/8 and 1/8. Which four depends on the token, and on
//! whether the token before it is even: so a model must look back on two tokens. The corpus is a list of windows. Each
//! begins with two random tokens and follows from its number: nothing is stored, and any rank can make any window.

use elastic_trainer::{Data, SampleError, Step, Unit, random::mix};

use crate::gpt::Tokens;

/// Tokens that may follow a pair.
pub(crate) const FOLLOWERS: usize = 4;

/// The entropy of the choice among the followers: 1/2, 1/4, 1/8 and 1/8 make 1.75 bits.
const ENTROPY: f64 = 1.75 * std::f64::consts::LN_2;

/// Windows of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Markov {
    vocabulary: usize,
    /// Tokens that are predicted in a window.
    time: usize,
    /// The first window's number.
    first: u64,
    windows: u64,
    seed: u64,
    /// The followers of each token, first where the token before it is even, then where it is odd. The likeliest comes
    /// first.
    followers: Vec<[u32; FOLLOWERS]>,
}

impl Markov {
    /// A source of so many windows, each of `time` tokens and one more. Another seed gives another source.
    ///
    /// # Panics
    /// With fewer tokens in the vocabulary than may follow a pair, or windows without tokens.
    pub(crate) fn new(vocabulary: usize, time: usize, windows: u64, seed: u64) -> Markov {
        assert!(vocabulary >= FOLLOWERS, "{vocabulary} tokens, but {FOLLOWERS} may follow a pair");
        assert!(time > 0, "windows of no tokens");
        let followers = (0..2 * vocabulary as u64).map(|pair| distinct(mix(seed) ^ (pair << 32), vocabulary)).collect();
        Markov { vocabulary, time, first: 0, windows, seed, followers }
    }

    /// So many windows of the same source that are not among these.
    pub(crate) fn held_out(&self, windows: u64) -> Markov {
        Markov { first: self.first + self.windows, windows, ..self.clone() }
    }

    /// Replaces the contents of `batch` with these windows.
    pub(crate) fn fill(&self, windows: &[u64], batch: &mut Tokens) {
        batch.time = self.time;
        batch.inputs.clear();
        batch.targets.clear();
        for &window in windows {
            batch.inputs.extend(self.window(self.first + window).take(self.time));
            batch.targets.extend(self.window(self.first + window).skip(1));
        }
    }

    /// The tokens of a window, in turn.
    fn window(&self, number: u64) -> impl Iterator<Item = u32> {
        let key = mix(!self.seed ^ mix(number));
        let mut last = [0; 2];
        (0..=self.time as u64).map(move |place| {
            let chance = mix(key.wrapping_add(place));
            let next = if place < 2 {
                (chance % self.vocabulary as u64) as u32
            } else {
                let [before, token] = last.map(|token| token as usize);
                // As many leading zeros as a fair coin shows heads before the first tail.
                let follower = (chance.leading_zeros() as usize).min(FOLLOWERS - 1);
                self.followers[before % 2 * self.vocabulary + token][follower]
            };
            last = [last[1], next];
            next
        })
    }
}

/// Different tokens for a key.
fn distinct(key: u64, vocabulary: usize) -> [u32; FOLLOWERS] {
    let mut found = [0; FOLLOWERS];
    let (mut count, mut draw) = (0, key);
    while count < FOLLOWERS {
        draw = mix(draw);
        let token = (draw % vocabulary as u64) as u32;
        if !found[..count].contains(&token) {
            found[count] = token;
            count += 1;
        }
    }
    found
}

impl Data for Markov {
    type Batch = Tokens;

    fn samples(&self) -> u64 {
        self.windows
    }

    fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Tokens) -> Result<(), SampleError> {
        self.fill(samples, batch);
        Ok(())
    }

    fn identity(&self) -> String {
        format!("--windows {} --corpus-seed {}", self.windows, self.seed)
    }

    fn unit(&self) -> Unit {
        Unit { name: "tokens", of_a_sample: self.time as u64 }
    }

    /// A window's first target is a random token: no model can predict it.
    fn reachable_loss(&self) -> Option<f64> {
        let time = self.time as f64;
        Some(((self.vocabulary as f64).ln() + (time - 1.0) * ENTROPY) / time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn windows_are_what_a_model_is_given_and_follow_from_their_number() {
        let source = Markov::new(11, 6, 9, 3);
        let mut batch = Tokens::default();
        source.fill(&[4, 2], &mut batch);
        assert_eq!((batch.time, batch.inputs.len(), batch.targets.len()), (6, 12, 12));
        // A token's target is the next one's input.
        assert_eq!(batch.inputs[1..6], batch.targets[..5]);
        let mut alone = Tokens::default();
        source.fill(&[2], &mut alone);
        assert_eq!(alone.inputs, batch.inputs[6..], "whatever else is read");
        Markov::new(11, 6, 9, 4).fill(&[2], &mut alone);
        assert_ne!(alone.inputs, batch.inputs[6..], "of another seed");
        source.held_out(5).fill(&[0], &mut batch);
        Markov::new(11, 6, 10, 3).fill(&[9], &mut alone);
        assert_eq!(batch.inputs, alone.inputs, "what is held out comes behind");
    }

    #[test]
    fn the_entropy_is_what_counting_finds() {
        // Given a long text, when what follows each pair is counted, then the entropy of the counts is the source's. No
        // model can do better, and one that knows the counts reaches it.
        let (vocabulary, time) = (8, 4000);
        let source = Markov::new(vocabulary, time, 50, 7);
        let mut batch = Tokens::default();
        source.fill(&(0..50).collect::<Vec<_>>(), &mut batch);
        let mut counts = BTreeMap::<(u32, u32), BTreeMap<u32, u32>>::new();
        for (inputs, targets) in batch.inputs.chunks(time).zip(batch.targets.chunks(time)) {
            for (pair, &target) in inputs.windows(2).zip(&targets[1..]) {
                *counts.entry((pair[0] % 2, pair[1])).or_default().entry(target).or_default() += 1;
            }
        }
        let (mut loss, mut all) = (0.0, 0.0);
        for followers in counts.values() {
            assert!(followers.len() <= FOLLOWERS);
            let total: u32 = followers.values().sum();
            for &count in followers.values() {
                loss -= f64::from(count) * (f64::from(count) / f64::from(total)).ln();
                all += f64::from(count);
            }
        }
        assert_eq!(all as usize, 50 * (time - 1));
        // Five standard errors: a token's surprise deviates by 0.58, and the text has 200 thousand.
        assert!((loss / all - ENTROPY).abs() < 0.0065, "{} for {ENTROPY}", loss / all);
        // Both parities matter.
        assert!((0..8).any(|token| source.followers[token] != source.followers[vocabulary + token]));
    }

    #[test]
    fn the_reachable_loss_counts_the_first_token() {
        let loss = |vocabulary, time| Markov::new(vocabulary, time, 1, 0).reachable_loss().unwrap();
        assert!((loss(64, 1) - 64f64.ln()).abs() < 1e-12);
        // (ln 64 + 3 · 1.75 · ln 2) / 4 = (6 + 5.25) / 4 · ln 2
        assert!((loss(64, 4) - 2.8125 * std::f64::consts::LN_2).abs() < 1e-12);
    }
}
