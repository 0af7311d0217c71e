//! Advice in the form in which the settings came: as flags, or as the variables of a pod's spec.

use super::list;
use crate::store::choice::StoreOptions;

/// The same text with a variable for each flag: `--rdzv-conf=is_host=1` becomes `PET_RDZV_CONF=is_host=1`, `--peer-key
/// FILE` becomes `PET_PEER_KEY=FILE`, and `--insecure` becomes `PET_INSECURE=1`.
pub(super) fn as_variables(text: &str) -> String {
    let mut parts = text.split("--");
    let mut written = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_lowercase() && c != '-').unwrap_or(part.len());
        let (name, rest) = part.split_at(end);
        let takes_value = list::takes_value(name);
        match takes_value {
            None => written.push_str("--"),
            Some(_) => written.push_str(&list::variable(name)),
        }
        let placeholder = rest.strip_prefix(' ').filter(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
        match (takes_value, placeholder) {
            (None, _) => written.push_str(part),
            (Some(false), _) => written.extend(["=1", rest]),
            (Some(true), Some(value)) => written.extend(["=", value]),
            (Some(true), None) => written.push_str(rest),
        }
    }
    written
}

impl StoreOptions {
    /// Advice that names flags, in the form in which the endpoint came.
    pub(crate) fn in_form(&self, advice: String) -> String {
        if self.by_variables { as_variables(&advice) } else { advice }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::error::Refusal;

    #[test]
    fn what_a_variable_said_is_advised_upon_in_variables() {
        let refused = |what: &str| Refusal::new("no", "give --peer-key FILE").of(what).to_string();
        assert_eq!(refused("PET_RDZV_ENDPOINT=a"), "PET_RDZV_ENDPOINT=a: no; give PET_PEER_KEY=FILE");
        assert_eq!(refused("--rdzv-endpoint=a"), "--rdzv-endpoint=a: no; give --peer-key FILE");
    }

    #[test]
    fn what_is_no_flag_stays_as_it_is() {
        for (flags, variables) in [
            ("write --rdzv-conf=is_host=1 once", "write PET_RDZV_CONF=is_host=1 once"),
            ("give --peer-cert FILE and --peer-key FILE", "give PET_PEER_CERT=FILE and PET_PEER_KEY=FILE"),
            ("or --insecure where", "or PET_INSECURE=1 where"),
            ("is --rdzv-endpoint (or --master-addr) right?", "is PET_RDZV_ENDPOINT (or PET_MASTER_ADDR) right?"),
            ("--nothing -- of this", "--nothing -- of this"),
            ("no flag", "no flag"),
        ] {
            assert_eq!(as_variables(flags), variables);
        }
    }
}
