//! What a run is, as data: ranks meet, and training continues, only where it is the same.
//!
//! Its text is what people can read in messages and checkpoints: flags with their values, parts in
//! parentheses, and what else a model says of itself.

use std::fmt;

/// Most differences that a message names.
const NAMED: usize = 8;

/// What determines a run's results: fields that each have a name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunIdentity(Vec<String>);

/// A field that differs between two runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The field's name, such as `lr`.
    pub name: String,
    /// Its words here, if it is here.
    pub ours: Option<String>,
    /// Its words there.
    pub theirs: Option<String>,
}

impl RunIdentity {
    /// Reads words: a field begins at each flag and at each parenthesis.
    pub fn parse(words: &str) -> RunIdentity {
        let (mut fields, mut depth) = (Vec::<String>::new(), 0_i32);
        for word in words.split_whitespace() {
            let begins = depth <= 0 && (word.starts_with("--") || word.starts_with('('));
            match fields.last_mut() {
                // What follows a part in parentheses belongs to no flag.
                Some(field) if !(begins || depth <= 0 && field.ends_with(')')) => *field += &format!(" {word}"),
                _ => fields.push(word.to_owned()),
            }
            depth += word.matches('(').count() as i32 - word.matches(')').count() as i32;
        }
        RunIdentity(fields)
    }

    /// Appends words.
    pub fn say(&mut self, words: &str) {
        self.0.extend(RunIdentity::parse(words).0);
    }

    /// The fields that differ from those of another run, in this one's order.
    pub fn differences(&self, theirs: &RunIdentity) -> Vec<Difference> {
        let mut left: Vec<&String> = theirs.0.iter().collect();
        let mut differences = Vec::new();
        for ours in &self.0 {
            let place = left.iter().position(|theirs| name_of(theirs) == name_of(ours));
            let theirs = place.map(|place| left.remove(place).clone());
            if theirs.as_ref() != Some(ours) {
                differences.push(Difference { name: name_of(ours).to_owned(), ours: Some(ours.clone()), theirs });
            }
        }
        differences.extend(left.into_iter().map(|theirs| Difference {
            name: name_of(theirs).to_owned(),
            ours: None,
            theirs: Some(theirs.clone()),
        }));
        differences
    }
}

/// A flag without its dashes; the first word in parentheses; else it is said of the model.
fn name_of(field: &str) -> &str {
    match (field.strip_prefix("--"), field.strip_prefix('(')) {
        (Some(flag), _) => flag.split(' ').next().unwrap_or_default(),
        // That of a rate that falls, which the number of epochs changes.
        (_, Some(inside)) if inside.starts_with("over ") => "epochs",
        (_, Some(inside)) if inside.starts_with(|letter: char| letter.is_ascii_digit()) => "data",
        (_, Some(inside)) => inside.split([' ', ')']).next().unwrap_or_default(),
        _ => "model",
    }
}

impl fmt::Display for RunIdentity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0.join(" "))
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { name, ours, theirs } = self;
        match (ours, theirs) {
            (Some(ours), Some(theirs)) => write!(out, "{ours} instead of {theirs}"),
            (Some(ours), None) => write!(out, "{ours} instead of none"),
            (None, Some(theirs)) => write!(out, "no {name} instead of {theirs}"),
            (None, None) => Ok(()),
        }
    }
}

/// Differences, for a reader.
pub fn listed(differences: &[Difference]) -> String {
    let named: Vec<String> = differences.iter().take(NAMED).map(ToString::to_string).collect();
    let more = differences.len().saturating_sub(NAMED);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    named.join("; ") + &more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_fields_and_fields_are_words() {
        for (words, names) in [
            ("--hidden 16,8 --lr 0.001 --seed 0 --shifts (data 0a1b2c3d)", "hidden lr seed shifts data"),
            ("(model 01234567) --lr-min 0 (over 70 steps) --seed 0 (100 samples)", "model lr-min epochs seed data"),
            ("two numbers --nesterov --betas 0.9,0.95 (on a GPU: NVIDIA H200 (sm 90))", "model nesterov betas on"),
            ("--data my file.csv (tensors 00000001) --epochs 4", "data tensors epochs"),
            ("(a) two numbers", "a model"),
            ("", ""),
        ] {
            let read = RunIdentity::parse(words);
            assert_eq!(read.to_string(), words);
            assert_eq!(read.0.iter().map(|field| name_of(field)).collect::<Vec<_>>().join(" "), names);
        }
    }

    #[test]
    fn differences_are_named_by_field() {
        let ours = RunIdentity::parse("--hidden 16 --lr 0.001 --clip 1 --seed 0 (data 0a)");
        let said = |theirs: &str| listed(&ours.differences(&RunIdentity::parse(theirs)));
        assert_eq!(said("--hidden 16 --lr 0.001 --clip 1 --seed 0 (data 0a)"), "");
        assert_eq!(said("--lr 0.001 --hidden 16 --clip 1 --seed 0 (data 0a)"), "", "whatever their order");
        assert_eq!(
            said("--hidden 16 --lr 0.01 --seed 0 --nesterov (data 0b)"),
            "--lr 0.001 instead of --lr 0.01; --clip 1 instead of none; (data 0a) instead of (data 0b); no nesterov \
             instead of --nesterov"
        );
        assert!(said("").ends_with("(data 0a) instead of none"));
        let many = (0..12).map(|number| format!("--flag{number}")).collect::<Vec<_>>().join(" ");
        assert!(said(&many).ends_with("; and 9 more"), "{}", said(&many));
    }
}
