//! `--print-completion`: the script that a shell needs to complete our flags.

use clap::{Arg, Command, ValueHint};
use clap_complete::{Generator, Shell};

use super::error::Refusal;

/// A script for `shell` that completes the flags of `program`.
pub(super) fn script(shell: &str, definition: &Command, program: &str) -> Result<String, Refusal> {
    let shell = match shell {
        "bash" => Shell::Bash,
        "zsh" => Shell::Zsh,
        "fish" => Shell::Fish,
        "tcsh" => return Ok(tcsh(definition, program)),
        other => {
            let cause = format!("`{other}` is not a known shell");
            return Err(Refusal::new(cause, "give bash, zsh, fish or tcsh"));
        }
    };
    let rest = Arg::new("PROGRAM").num_args(0..).value_hint(ValueHint::AnyPath);
    let mut visible =
        Command::new(program.to_owned()).disable_help_flag(true).args(visible(definition).cloned()).arg(rest);
    visible.set_bin_name(program);
    visible.build();
    let mut script = Vec::new();
    shell.generate(&visible, &mut script);
    Ok(String::from_utf8_lossy(&script).into_owned())
}

/// The flags to complete. Flags that are accepted but not advertised are left out.
fn visible(definition: &Command) -> impl Iterator<Item = &Arg> {
    definition.get_arguments().filter(|arg| !arg.is_hide_set())
}

/// clap has no generator for tcsh. tcsh's `complete` offers words after a beginning: here flags after `--`, and files
/// elsewhere.
fn tcsh(definition: &Command, program: &str) -> String {
    let flags: Vec<&str> = visible(definition).filter_map(Arg::get_long).collect();
    format!("complete {program} 'c/--/({})/' 'p/*/f/'\n", flags.join(" "))
}
