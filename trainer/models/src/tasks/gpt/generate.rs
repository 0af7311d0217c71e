//! `elastic-trainer generate`: text from a trained GPT.

use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;

use clap::Args;
use elastic_trainer::{Result, Step};

use super::trained::Trained;
use crate::gpt::Decoder;

/// What to generate, and from what.
#[derive(Debug, Clone, Args)]
pub struct Generate {
    /// Folder that --checkpoint-dir named, or one with config.json and model.safetensors
    pub dir: PathBuf,
    /// The checkpoint's step [default: the newest whole one]
    #[arg(long)]
    pub step: Option<u64>,
    /// What to continue: text if the model was trained with --text, else numbers of tokens, such as 17,4,9 [default: a
    /// line's end, or token 0]
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Tokens to generate
    #[arg(long, value_name = "COUNT", default_value_t = 300)]
    pub tokens: u64,
    /// Divides the logits: below 1 likely tokens become likelier; 0 always takes the likeliest
    #[arg(long, default_value = "0.8", value_parser = not_negative)]
    pub temperature: f32,
    /// Choose among this many likeliest tokens [default: all]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub top_k: Option<u32>,
    /// Seed of the choices: the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

fn not_negative(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|&value: &f32| value.is_finite() && value >= 0.0).ok_or("must be 0 or more".to_owned())
}

impl Generate {
    /// Prints the prompt and what follows it, token by token.
    pub fn run(&self, out: &mut dyn Write) -> Result<()> {
        match self.print(&Trained::load(&self.dir, self.step)?, out) {
            // The reader of the pipe has seen enough.
            Err(error) if error.downcast_ref().is_some_and(|e: &io::Error| e.kind() == ErrorKind::BrokenPipe) => Ok(()),
            result => result,
        }
    }

    fn print(&self, trained: &Trained, out: &mut dyn Write) -> Result<()> {
        let prompt = self.prompt(trained)?;
        let mut printer = Printer { is_text: trained.is_of_bytes, pending: Vec::new(), out };
        if self.prompt.is_some() {
            prompt.iter().try_for_each(|token| printer.token(*token))?;
        }
        let mut reader = Reader { trained, decoder: Decoder::new(&trained.gpt, &trained.parameters), read: Vec::new() };
        let mut logits = Vec::new();
        for token in prompt {
            logits = reader.read(token);
        }
        for number in 0..self.tokens {
            let token = self.choose(&logits, Step::new(self.seed, number, 0, &[]).random(0).unit());
            printer.token(token)?;
            logits = reader.read(token);
        }
        Ok(printer.end()?)
    }

    fn prompt(&self, trained: &Trained) -> Result<Vec<u32>> {
        let vocabulary = trained.gpt.size().vocabulary;
        let words = self.prompt.as_deref().filter(|prompt| !prompt.is_empty());
        match (words, trained.is_of_bytes) {
            (None, true) => Ok(vec![u32::from(b'\n')]),
            (None, false) => Ok(vec![0]),
            (Some(text), true) => Ok(text.bytes().map(u32::from).collect()),
            (Some(numbers), false) => {
                let words = numbers.split([',', ' ']).filter(|word| !word.is_empty());
                let token = |word: &str| {
                    let token = word.parse().ok().filter(|token| (*token as usize) < vocabulary);
                    token.ok_or_else(|| {
                        let most = vocabulary - 1;
                        format!("--prompt: \"{word}\" is no token of this model; write numbers from 0 to {most}").into()
                    })
                };
                let tokens = words.map(token).collect::<Result<Vec<u32>>>()?;
                Ok(if tokens.is_empty() { vec![0] } else { tokens })
            }
        }
    }

    /// The next token, by a number in `[0, 1)`.
    fn choose(&self, logits: &[f32], chance: f32) -> u32 {
        let mut classes: Vec<u32> = (0..logits.len() as u32).collect();
        classes.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
        let count = if self.temperature > 0.0 { self.top_k.map_or(classes.len(), |count| count as usize) } else { 1 };
        classes.truncate(count);
        let largest = logits[classes[0] as usize];
        let weight = |class: &u32| f64::from((logits[*class as usize] - largest) / self.temperature).exp();
        let weights: Vec<f64> = if count == 1 { vec![1.0] } else { classes.iter().map(weight).collect() };
        let mut left = f64::from(chance) * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        classes[chosen.unwrap_or(classes.len() - 1)]
    }
}

/// Reads a sequence that may be longer than the context.
struct Reader<'a> {
    trained: &'a Trained,
    decoder: Decoder<'a>,
    read: Vec<u32>,
}

impl Reader<'_> {
    /// The logits of the token that follows this one. Where the context is full, its second half is read again as the
    /// first.
    fn read(&mut self, token: u32) -> Vec<f32> {
        let context = self.trained.gpt.size().context;
        if self.decoder.length() == context {
            self.decoder = Decoder::new(&self.trained.gpt, &self.trained.parameters);
            let again = self.read.len() - context / 2;
            self.read[again..].iter().for_each(|token| _ = self.decoder.push(*token));
        }
        self.read.push(token);
        self.decoder.push(token).to_vec()
    }
}

/// Prints tokens: numbers, or the text that they spell.
struct Printer<'a> {
    is_text: bool,
    /// The bytes of a character that is not whole yet.
    pending: Vec<u8>,
    out: &'a mut dyn Write,
}

impl Printer<'_> {
    fn token(&mut self, token: u32) -> io::Result<()> {
        if !self.is_text {
            write!(self.out, "{token} ")?;
            return self.out.flush();
        }
        self.pending.push(token as u8);
        let incomplete = std::str::from_utf8(&self.pending).is_err_and(|error| error.error_len().is_none());
        if incomplete { Ok(()) } else { self.release() }
    }

    /// Prints what is pending. A terminal takes no orders from a model: control characters are replaced.
    fn release(&mut self) -> io::Result<()> {
        let text = String::from_utf8_lossy(&self.pending);
        let shown =
            |c: char| if c.is_control() && !['\n', '\t'].contains(&c) { char::REPLACEMENT_CHARACTER } else { c };
        let text: String = text.chars().map(shown).collect();
        self.pending.clear();
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }

    fn end(mut self) -> io::Result<()> {
        self.release()?;
        writeln!(self.out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        flags: Generate,
    }

    fn chosen(flags: &str, logits: &[f32], chance: f32) -> u32 {
        let words = format!("generate dir {flags}");
        Words::parse_from(words.split_whitespace()).flags.choose(logits, chance)
    }

    #[test]
    fn tokens_are_chosen_by_their_probability() {
        // e^0 : e^ln 3 is 1 : 3.
        let logits = [0.0, 3f32.ln()];
        let often = |flags: &str| (0..1000).filter(|n| chosen(flags, &logits, *n as f32 / 1000.0) == 1).count();
        assert!(often("--temperature 1").abs_diff(750) <= 1);
        // With half the temperature the odds are squared.
        assert!(often("--temperature 0.5").abs_diff(900) <= 1);
        assert_eq!((often("--temperature 0"), often("--top-k 1")), (1000, 1000));
        let among: Vec<u32> = (0..100).map(|n| chosen("--top-k 2", &[1.0, 0.9, 0.8, 1.1], n as f32 / 100.0)).collect();
        assert!(among.contains(&0) && among.contains(&3) && !among.contains(&1) && !among.contains(&2));
    }

    #[test]
    fn text_is_printed_by_whole_characters_and_gives_terminals_no_orders() {
        let mut out = Vec::new();
        let mut printer = Printer { is_text: true, pending: Vec::new(), out: &mut out };
        for byte in "aé\u{1b}[2J\n".bytes().chain([0xff, b'z', 0xc3]) {
            printer.token(byte.into()).unwrap();
        }
        printer.end().unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "aé\u{fffd}[2J\n\u{fffd}z\u{fffd}\n");
    }
}
