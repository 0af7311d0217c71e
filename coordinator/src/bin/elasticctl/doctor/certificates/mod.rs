//! Judges for how long certificates are good: each member's as it shows it, ours, and those of the CAs that we trust.
//! Pure: `greet` has them shown, and `look` reads the files.

use elastic_rendezvous::time::date::utc;
use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::finding::{Finding, State};

const DAY: u64 = 86_400;

/// One that ends within this is worth a warning, as for `certificates.sh expiry`.
const SOON: u64 = 30 * DAY;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    Etcds,
    /// The client's, which is this program and anyone who has the same file.
    Ours,
    Cas,
    /// With which agents and coordinators speak with each other.
    Peers,
    PeersAuthority,
}

/// Certificates that belong together.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) whose: Whose,
    /// An endpoint, or a file.
    pub(super) of: String,
    /// The one that counts first, and those that vouch for it; of CAs, each counts.
    pub(super) certificates: Vec<CertificateDer<'static>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Certificate {
    /// Its subject, as `CN=etcd0.example.org`.
    subject: String,
    name: String,
    /// From when and until when it is good, in seconds since 1970.
    from: u64,
    until: u64,
}

impl Certificate {
    fn parse(der: &CertificateDer<'_>) -> Result<Certificate, String> {
        let (_, parsed) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        let validity = parsed.validity();
        let name = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        Ok(Certificate {
            subject: parsed.subject().to_string(),
            name: name.unwrap_or("NAME").to_owned(),
            from: seconds(validity.not_before.timestamp()),
            until: seconds(validity.not_after.timestamp()),
        })
    }
}

/// One line for each certificate. `now_ms` is this machine's clock.
pub(super) fn judge(shown: &Shown, now_ms: u64) -> Vec<Finding> {
    let parsed: Vec<_> = shown.certificates.iter().map(Certificate::parse).collect();
    let now = now_ms / 1000;
    let good = |parsed: &Result<Certificate, _>| parsed.as_ref().is_ok_and(|one| one.from <= now && now < one.until);
    // Where a CA follows another, both are in the file.
    let spare = matches!(shown.whose, Whose::Cas | Whose::PeersAuthority) && parsed.iter().any(good);
    let line = |parsed: &Result<Certificate, String>| match parsed {
        Ok(certificate) => one(shown, certificate, spare, now),
        Err(why) => Finding::unknown("certificate", &shown.of, format!("cannot be read: {why}")),
    };
    parsed.iter().map(line).collect()
}

fn one(shown: &Shown, certificate: &Certificate, spare: bool, now: u64) -> Finding {
    let Certificate { subject, name, from, until } = certificate;
    let say = |state: State, seen: String| Finding::new(state, "certificate", &shown.of, format!("{subject} {seen}"));
    // To the minute
    let date = |seconds: u64| format!("{} UTC", &utc(seconds * 1000)[..16]);
    if *from > now {
        let seen = format!("is good only from {} on", date(*from));
        return say(State::Failed, seen).advise(
            "wait, or set the clock that is wrong: this machine's or that of the machine that signed it; date -u shows \
             it",
        );
    }
    if now >= *until {
        let ended = format!("has ended, {}", date(*until));
        return if spare {
            say(State::Warning, ended).advise(format!("take it out of {}: another one there is good", shown.of))
        } else {
            say(State::Failed, ended).advise(renew(shown, name))
        };
    }
    let seen = format!("is good until {}, {} days", date(*until), (until - now) / DAY);
    if until - now < SOON { say(State::Warning, seen).advise(renew(shown, name)) } else { say(State::Ok, seen) }
}

/// What to type, where `deploy/etcd/certificates.sh` or `elasticctl certs` has made it.
fn renew(shown: &Shown, name: &str) -> String {
    let of = &shown.of;
    match shown.whose {
        Whose::Etcds => format!(
            "have it signed again; by etcd/certificates.sh renew DIRECTORY {name}, if that made it. Copy it to its place \
             on {of}: etcd reads it for its next connection"
        ),
        Whose::Ours => {
            // As certificates.sh names clients
            let name = name.strip_prefix("client ").unwrap_or(name);
            format!(
                "have it signed again; by etcd/certificates.sh renew DIRECTORY {name}, if that made it. Copy it to {of}, \
                 here and wherever it is used: it is read for the next connection"
            )
        }
        Whose::Peers => format!(
            "have it signed again; by elasticctl certs node FOLDER {name} --renew, if that made it. Copy it to {of}: \
             it is read within a second"
        ),
        Whose::PeersAuthority => format!(
            "make one that follows it (elasticctl certs authority NEWFOLDER), and add its ca.pem to {of} on every host; \
             only then make the nodes' certificates by it"
        ),
        Whose::Cas => format!(
            "make a CA that follows it (etcd/certificates.sh new DIRECTORY), and add its ca.pem to {of} and to etcd's \
             trusted-ca-file everywhere; only then make the members' and the clients' certificates by it"
        ),
    }
}

#[cfg(test)]
mod tests;
