//! How the values of flags are read: times, sizes, endpoints. The same in all programs. Which values a flag takes beyond
//! that is the flag's own matter.

#![forbid(unsafe_code)]

use std::fmt;
use std::net::Ipv6Addr;
use std::time::Duration;

/// Why a text is not taken, and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// What is wrong.
    pub cause: String,
    /// What to write.
    pub advice: String,
}

impl Refused {
    fn new(cause: impl Into<String>, advice: impl Into<String>) -> Refused {
        Refused { cause: cause.into(), advice: advice.into() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.cause, self.advice)
    }
}

impl std::error::Error for Refused {}

/// More would be a slip, and no sum with it overflows.
const HUNDRED_YEARS: Duration = Duration::from_secs(36_500 * 86_400);

/// Reads a time with its unit: `500ms`, `30s`, `1.5h`, `7d`. A bare number is an error, since people mean different
/// units by it.
pub fn duration(text: &str) -> Result<Duration, Refused> {
    const ADVICE: &str = "write a number with ms, s, m, h or d, for example 90m, 12h or 7d";
    time(text, None, ADVICE)
}

/// Reads a time as [`duration`] does; a bare number counts seconds, as with torchrun.
pub fn duration_or_seconds(text: &str) -> Result<Duration, Refused> {
    const ADVICE: &str = "write seconds or a number with ms, s, m, h or d, for example 30, 500ms or 10m";
    time(text, Some(1.0), ADVICE)
}

fn time(text: &str, bare: Option<f64>, advice: &str) -> Result<Duration, Refused> {
    let text = text.trim();
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0)];
    let with_unit = units.into_iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, Some(seconds))));
    let (number, unit) = with_unit.unwrap_or((text, bare));
    let number: f64 = match number.trim().parse() {
        Ok(number) if f64::is_finite(number) => number,
        _ => return Err(Refused::new(format!("`{text}` is not a time"), advice)),
    };
    let Some(unit) = unit else { return Err(Refused::new(format!("`{text}` has no unit"), advice)) };
    if number < 0.0 {
        return Err(Refused::new("a time cannot be negative", advice));
    }
    match Duration::try_from_secs_f64(number * unit) {
        Ok(time) if time <= HUNDRED_YEARS => Ok(time),
        _ => Err(Refused::new(format!("`{text}` is longer than 100 years"), advice)),
    }
}

/// Reads a number of bytes: `4096`, `500M`, `256MiB`. K, M and G are powers of 1024 with and without `iB`. `MB` is not
/// taken: people mean different numbers by it.
pub fn size(text: &str) -> Result<u64, Refused> {
    let lower = text.trim().to_ascii_lowercase();
    let letters = lower.strip_suffix("ib").filter(|rest| rest.ends_with(['k', 'm', 'g'])).unwrap_or(&lower);
    let units = [('k', 10), ('m', 20), ('g', 30)];
    let with_unit = units.into_iter().find_map(|(unit, shift)| Some((letters.strip_suffix(unit)?, shift)));
    let (number, shift) = with_unit.unwrap_or((letters, 0));
    let plain = number.bytes().all(|byte| byte.is_ascii_digit());
    let bytes = number.parse().ok().and_then(|number: u64| number.checked_mul(1 << shift)).filter(|_| plain);
    bytes.ok_or_else(|| Refused::new(format!("`{text}` is not a size"), "give one such as 4096, 500M or 256MiB"))
}

/// What to write as an endpoint.
pub const ENDPOINT: &str = "write HOST[:PORT], [IPV6][:PORT], or several with commas";

/// Reads `HOST[:PORT]`; an IPv6 address has brackets. Answers the host, without brackets, and the port.
pub fn endpoint(text: &str, default_port: u16) -> Result<(String, u16), Refused> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let Some((host, after)) = rest.split_once(']') else {
                return Err(Refused::new(format!("`{text}` lacks the closing `]`"), ENDPOINT));
            };
            if let Some((address, _)) = zoned(host) {
                return Err(zone(host, address, default_port));
            }
            if host.parse::<Ipv6Addr>().is_err() {
                return Err(Refused::new(format!("`{host}` is not an IPv6 address"), ENDPOINT));
            }
            match after.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if after.is_empty() => (host, None),
                None => return Err(Refused::new(format!("`{after}` follows the `]`"), ENDPOINT)),
            }
        }
        None if text.matches(':').count() > 1 => return Err(bare_ipv6(text, default_port)),
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() {
        return Err(Refused::new("a host is missing", ENDPOINT));
    }
    // Host names have no underscores, but many container names do.
    if let Some(c) = host.chars().find(|&c| !(c.is_ascii_alphanumeric() || "._-:".contains(c))) {
        return Err(Refused::new(format!("{c:?} cannot be part of a host name"), ENDPOINT));
    }
    let port = match port {
        None => default_port,
        Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
            digits.parse().map_err(|_| Refused::new(format!("{digits} is not a port"), "ports go from 1 to 65535"))?
        }
        Some(other) => return Err(Refused::new(format!("`{other}` is not a port"), ENDPOINT)),
    };
    Ok((host.to_owned(), port))
}

/// Why an endpoint with several colons and without brackets is refused. Names both ways to read it where there are two.
fn bare_ipv6(text: &str, default_port: u16) -> Refused {
    if let Some((address, rest)) = zoned(text) {
        return zone(&text[..text.len() - rest.len()], address, default_port);
    }
    let is_port = |digits: &str| digits.len() <= 5 && digits.parse::<u16>().is_ok_and(|port| port > 0);
    let with_port = text.rsplit_once(':').filter(|(host, port)| host.parse::<Ipv6Addr>().is_ok() && is_port(port));
    let with_port = with_port.map(|(host, port)| format!("[{host}]:{port}"));
    let whole = text.parse::<Ipv6Addr>().is_ok().then(|| format!("[{text}]:{default_port}"));
    match (with_port, whole) {
        (None, None) => Refused::new(format!("`{text}` is neither a host with a port nor an IPv6 address"), ENDPOINT),
        (with_port, whole) => {
            let ways: Vec<String> = with_port.into_iter().chain(whole).collect();
            let cause = "without brackets, an IPv6 address and a port look the same";
            Refused::new(cause, format!("write {}", ways.join(" or ")))
        }
    }
}

/// The address before an interface's name, `fe80::1` in `fe80::1%eth0:2379`, and what follows the name.
fn zoned(text: &str) -> Option<(&str, &str)> {
    let (address, zone) = text.split_once('%').filter(|(address, _)| address.parse::<Ipv6Addr>().is_ok())?;
    Some((address, zone.find(':').map_or("", |end| &zone[end..])))
}

fn zone(text: &str, address: &str, default_port: u16) -> Refused {
    let cause = format!("`{text}` is on a network interface of this machine, which has another name elsewhere");
    let advice =
        format!("write a name or an address that all machines reach, as [{address}]:{default_port} if it is one");
    Refused::new(cause, advice)
}

/// Writes a time as people do, and as [`duration`] reads it, to three digits: `15m`, `2.5s`, `300ms`.
pub fn written(time: Duration) -> String {
    let ms = time.as_millis() as f64;
    let units = [("d", 86_400_000.0), ("h", 3_600_000.0), ("m", 60_000.0), ("s", 1000.0)];
    // A minute and a half is 90s: the largest unit in which the number is whole, else seconds.
    let rounded = if ms >= 10_000.0 { (ms / 1000.0).round() * 1000.0 } else { (ms / 100.0).round() * 100.0 };
    if ms < 1000.0 {
        return format!("{ms}ms");
    }
    let unit = units.iter().find(|(_, unit)| rounded % unit == 0.0).unwrap_or(&("s", 1000.0));
    format!("{}{}", rounded / unit.1, unit.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit_or_count_seconds_where_that_is_meant() {
        let ms = Duration::from_millis;
        for (text, time) in [
            ("500ms", ms(500)),
            ("0s", ms(0)),
            ("30s", ms(30_000)),
            (" 1.5h ", ms(5_400_000)),
            ("90m", ms(5_400_000)),
            ("12 h", ms(43_200_000)),
            ("7d", ms(604_800_000)),
            ("36500d", HUNDRED_YEARS),
            ("7ms", ms(7)),
        ] {
            assert_eq!(duration(text), Ok(time), "{text}");
            assert_eq!(duration_or_seconds(text), Ok(time), "{text}");
        }
        for (text, time) in
            [("30", ms(30_000)), ("0.5", ms(500)), (".5", ms(500)), ("1e3", ms(1_000_000)), ("+2", ms(2000))]
        {
            assert_eq!(duration_or_seconds(text), Ok(time), "{text}");
            assert!(duration(text).is_err_and(|refused| refused.cause.ends_with("has no unit")), "{text}");
        }
        for (text, cause) in [
            ("", "`` is not a time"),
            ("d", "`d` is not a time"),
            ("soon", "`soon` is not a time"),
            ("7w", "`7w` is not a time"),
            ("1.2.3", "`1.2.3` is not a time"),
            ("nan", "`nan` is not a time"),
            ("infs", "`infs` is not a time"),
            ("-1d", "a time cannot be negative"),
            ("36501d", "`36501d` is longer than 100 years"),
            ("99999999999999999999s", "is longer than 100 years"),
        ] {
            for refused in [duration(text), duration_or_seconds(text)] {
                assert!(refused.clone().is_err_and(|refused| refused.cause.contains(cause)), "{text}: {refused:?}");
            }
        }
    }

    #[test]
    fn a_time_is_written_as_it_is_read() {
        for (us, text) in [
            (899_999_711, "15m"),
            (900_000_000, "15m"),
            (90_000_000, "90s"),
            (2_500_000, "2.5s"),
            (2_499_900, "2.5s"),
            (300_000, "300ms"),
            (7_200_000_000, "2h"),
            (0, "0ms"),
        ] {
            let text_again = written(Duration::from_micros(us));
            assert_eq!(text_again, text);
            assert!(duration(&text_again).is_ok());
        }
    }

    #[test]
    fn a_refused_ipv6_endpoint_shows_the_form_to_write() {
        for (text, form) in [
            ("::1", "write [::1]:2379"),
            ("::1:29400", "write [::1]:29400"),
            ("fd00::1:2379", "write [fd00::1]:2379 or [fd00::1:2379]:2379"),
            ("2001:db8:0:0:0:0:0:7:29400", "write [2001:db8:0:0:0:0:0:7]:29400"),
            ("fe80::1%eth0", "as [fe80::1]:2379"),
            ("fe80::1%eth0:2379", "as [fe80::1]:2379"),
            ("[fe80::1%eth0]:2379", "as [fe80::1]:2379"),
        ] {
            let refused = endpoint(text, 2379).unwrap_err();
            assert!(refused.advice.contains(form), "{text}: {refused}");
        }
    }

    #[test]
    fn sizes_are_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("16k", 16 << 10),
            ("16K", 16 << 10),
            ("16KiB", 16 << 10),
            ("500M", 500 << 20),
            ("256MiB", 256 << 20),
            ("1G", 1 << 30),
            ("1GiB", 1 << 30),
            ("1gib", 1 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "+1", "1.5G", "256MB", "256iB", "256B", "1T", "lots", "99999999999999G"] {
            let refused = size(text).unwrap_err();
            assert_eq!(refused.cause, format!("`{text}` is not a size"));
        }
    }

    #[test]
    fn endpoints_are_hosts_with_or_without_a_port() {
        for (text, host, port) in [
            ("a", "a", 2379),
            ("gpu_1.example.org:1", "gpu_1.example.org", 1),
            ("10.0.0.1:70", "10.0.0.1", 70),
            ("[::1]", "::1", 2379),
            ("[::1]:5", "::1", 5),
        ] {
            assert_eq!(endpoint(text, 2379), Ok((host.to_owned(), port)), "{text}");
        }
        for (text, cause) in [
            ("", "a host is missing"),
            (":1", "a host is missing"),
            ("a:", "`` is not a port"),
            ("a:b", "`b` is not a port"),
            ("a:65536", "65536 is not a port"),
            ("u:p@a:1", "neither a host with a port nor an IPv6 address"),
            ("a/path", "'/' cannot be part of a host name"),
            ("[a]", "`a` is not an IPv6 address"),
            ("[::1", "lacks the closing `]`"),
            ("[::1]5", "`5` follows the `]`"),
            ("::1", "without brackets, an IPv6 address"),
            ("a:1:2", "neither a host with a port nor an IPv6 address"),
        ] {
            let refused = endpoint(text, 2379).unwrap_err();
            assert!(refused.cause.contains(cause), "{text}: {refused}");
        }
    }
}
