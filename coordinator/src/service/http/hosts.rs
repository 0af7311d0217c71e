//! By which names a port is called. A page of another site can have its own name lead to this port (DNS rebinding), and
//! a browser then takes our answers for that site's. The request's `Host` still tells the name.
//!
//! Only a port that shows jobs to anyone over plain HTTP needs this. Where each request has a token, no such page has
//! one; over TLS, browsers compare the name with the certificate. `/live`, `/ready` and `/metrics` are answered by any
//! name.

use std::collections::BTreeSet;
use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{StatusCode, header, uri::Authority};

use super::problem::Problem;

/// The names that a port takes in a request's `Host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hosts {
    /// All.
    Any,
    /// These, and all addresses, which no one can have lead elsewhere.
    Known(BTreeSet<String>),
}

impl Hosts {
    /// These, this machine's own, and `localhost`; all if one of these is `*`.
    pub fn known(given: impl IntoIterator<Item = String>) -> Hosts {
        let read = |file| std::fs::read_to_string(file).unwrap_or_default();
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let own = names(&machine, &read("/etc/hosts"), &read("/etc/resolv.conf"));
        let all: BTreeSet<String> = given.into_iter().chain(own).map(|name| written(&name)).collect();
        if all.contains("*") { Hosts::Any } else { Hosts::Known(all) }
    }

    /// Whether a request calls this port by such a name, or by none, as browsers never do.
    pub(super) fn admit(&self, request: &Request) -> Result<(), Problem> {
        let Hosts::Known(names) = self else { return Ok(()) };
        // HTTP/2 has it in the URI.
        let headers = request.headers().get_all(header::HOST).iter().map(|host| host.as_bytes());
        for host in request.uri().authority().map(|host| host.as_str().as_bytes()).into_iter().chain(headers) {
            let name = Authority::try_from(host).map(|host| written(host.host())).unwrap_or_default();
            let address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
            if !address && name != "localhost" && !name.ends_with(".localhost") && !names.contains(&name) {
                return Err(Problem(
                    StatusCode::FORBIDDEN,
                    format!(
                        "this port is not known as {name:?}: call it by its address, or start the coordinator with \
                         --allowed-host {name}"
                    ),
                ));
            }
        }
        Ok(())
    }
}

fn written(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

fn words(line: &str) -> impl Iterator<Item = String> {
    line.split('#').next().unwrap_or_default().split_whitespace().map(str::to_owned)
}

/// A machine's names: its own, alone and in the domains that its resolver searches, and those next to it in its file of
/// hosts.
fn names(machine: &str, hosts: &str, resolver: &str) -> Vec<String> {
    let aliases = hosts.lines().map(|line| words(line).skip(1).collect::<Vec<_>>());
    let aliases = aliases.filter(|names| names.iter().any(|name| name == machine)).flatten();
    let searched = resolver.lines().filter(|line| line.starts_with("search ") || line.starts_with("domain "));
    let searched = searched.flat_map(|line| words(line).skip(1)).map(|domain| format!("{machine}.{domain}"));
    [machine.to_owned()].into_iter().chain(aliases).chain(searched).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    #[test]
    fn a_port_is_called_by_its_names_and_addresses_alone() {
        let hosts = Hosts::Known(["gpu1".to_owned()].into());
        for (host, known) in [
            ("GPU1.:9400", true),
            ("10.0.0.1:9400", true),
            ("[fd00::1]:9400", true),
            ("jobs.localhost", true),
            ("gpu1.evil.example", false),
            ("10.0.0.1.evil.example", false),
            ("gpu1@evil.example", false),
            ("", false),
        ] {
            let header = Request::builder().uri("/v1/jobs").header("host", host).body(Body::empty()).unwrap();
            assert_eq!(hosts.admit(&header).is_ok(), known, "{host}");
            let both = Request::builder().uri(format!("http://{host}/")).header("host", "gpu1").body(Body::empty());
            assert!(both.is_err() || hosts.admit(&both.unwrap()).is_ok() == known, "{host} in the URI");
            assert!(Hosts::known(["*".to_owned()]).admit(&header).is_ok());
        }
        assert!(hosts.admit(&Request::new(Body::empty())).is_ok(), "HTTP/1.0 has none");
    }

    #[test]
    fn a_machine_is_known_by_its_full_name() {
        let hosts = "127.0.0.1 localhost\n127.0.1.1 gpu1.hosts.example gpu1 # ours\n10.0.0.2 gpu2\n";
        let found = names("gpu1", hosts, "nameserver 10.0.0.9\nsearch dns.example a.example\n");
        assert_eq!(found, ["gpu1", "gpu1.hosts.example", "gpu1", "gpu1.dns.example", "gpu1.a.example"]);
    }
}
