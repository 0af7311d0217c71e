//! `${local_rank}` and similar names in workers' arguments and in console prefixes. The caller says which names there
//! are.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Replaces `$name` and `${name}` if `value` knows the name, and `$$` by `$`. Everything else stays unchanged.
///
/// The rules are those of Python's `string.Template.safe_substitute`, which torchrun applies to every argument.
pub(crate) fn substitute(template: &OsStr, mut value: impl FnMut(&str) -> Option<String>) -> OsString {
    let mut rest = template.as_bytes();
    let mut result = Vec::with_capacity(rest.len());
    while let Some(dollar) = rest.iter().position(|byte| *byte == b'$') {
        result.extend_from_slice(&rest[..dollar]);
        rest = &rest[dollar..];
        let (consumed, replacement) = match rest.get(1) {
            Some(b'$') => (2, Some(b"$".to_vec())),
            Some(b'{') => {
                let name = identifier(&rest[2..]);
                let closed = rest.get(2 + name.len()) == Some(&b'}');
                (3 + name.len(), value(name).filter(|_| closed && !name.is_empty()).map(String::into_bytes))
            }
            _ => {
                let name = identifier(&rest[1..]);
                (1 + name.len(), value(name).filter(|_| !name.is_empty()).map(String::into_bytes))
            }
        };
        match replacement {
            Some(bytes) => {
                result.extend_from_slice(&bytes);
                rest = &rest[consumed..];
            }
            None => {
                result.push(b'$');
                rest = &rest[1..];
            }
        }
    }
    result.extend_from_slice(rest);
    OsString::from_vec(result)
}

/// Whether the template uses this name.
pub(crate) fn mentions(template: &OsStr, name: &str) -> bool {
    let mut found = false;
    substitute(template, |other| {
        found |= other == name;
        None
    });
    found
}

/// The identifier at the beginning of `bytes`. It may be empty.
fn identifier(bytes: &[u8]) -> &str {
    let inside = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let length = bytes.iter().take_while(|byte| inside(byte)).count();
    match bytes.first() {
        Some(first) if !first.is_ascii_digit() => std::str::from_utf8(&bytes[..length]).unwrap_or(""),
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn with_rank_3(template: &str) -> String {
        let value = |name: &str| (name == "local_rank").then(|| "3".to_owned());
        substitute(OsStr::new(template), value).into_string().unwrap()
    }

    #[test]
    fn known_names_are_replaced_and_everything_else_stays() {
        assert_eq!(with_rank_3("--out=a$local_rank/${local_rank}b"), "--out=a3/3b");
        assert_eq!(with_rank_3("${rank} $rank $local_rank_x ${local_rank"), "${rank} $rank $local_rank_x ${local_rank");
        assert_eq!(with_rank_3("$$local_rank costs $5 and ${}$"), "$local_rank costs $5 and ${}$");
        assert_eq!(with_rank_3("é$local_rank${é}"), "é3${é}");
    }

    proptest! {
        #[test]
        fn text_without_dollars_is_untouched(text in "[^$]*") {
            prop_assert_eq!(with_rank_3(&text), text);
        }
    }
}
