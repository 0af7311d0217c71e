//! `elasticctl certs`: a private authority, and the certificates that it signs, for mutual TLS among agents and
//! coordinators. Files of etcd's own authority are `deploy/etcd/certificates.sh`'s.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use elastic_coordinator::flags::operator::CertsCommand;
use elastic_rendezvous::time::date;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::{print, print_json};

/// A certificate is good from so long ago, for hosts whose clocks are behind.
const CLOCKS: Duration = Duration::from_secs(300);

/// Modes of files: for everybody, and for the owner alone.
const PUBLIC: u32 = 0o644;
const SECRET: u32 = 0o600;

struct Made {
    name: String,
    certificate: PathBuf,
    key: PathBuf,
    until: OffsetDateTime,
}

/// Makes what is asked, and says what to type next.
pub(crate) fn make(what: CertsCommand, json: bool) -> anyhow::Result<()> {
    let (made, next) = match what {
        CertsCommand::Authority { folder, valid } => {
            let made = authority(&folder, valid)?;
            let next = format!(
                "{} goes to every host; {} stays here: who has it can become a node\nnext: elasticctl certs node {} \
                 HOST…\n",
                made.certificate.display(),
                made.key.display(),
                folder.display()
            );
            (vec![made], next)
        }
        CertsCommand::Node { folder, names, valid, renew } => {
            let made = nodes(&folder, &names, valid, renew)?;
            let [certificate, key] = [&made[0].certificate, &made[0].key].map(|path| path.display());
            let ca = folder.join("ca.pem");
            let next = if renew {
                "next: copy each certificate over the old one on its host; its key is as before, and running programs read \
                 it within a second\n"
                    .to_owned()
            } else {
                format!(
                    "next: copy its own two files and {ca} to each host, then there: elastic-agent --peer-cert {certificate} \
                     --peer-key {key} --peer-ca {ca} …\n",
                    ca = ca.display()
                )
            };
            (made, next)
        }
    };
    if json {
        return print_json(&Value::Array(made.iter().map(record).collect()));
    }
    let line = |made: &Made| {
        let (certificate, key) = (made.certificate.display(), made.key.display());
        format!("{}: {certificate} and {key}, good until {} UTC\n", made.name, minute(made.until))
    };
    print(&made.iter().map(line).chain([next]).collect::<String>())
}

fn record(made: &Made) -> Value {
    json!({ "name": made.name, "certificate": made.certificate, "key": made.key, "until": minute(made.until) })
}

fn minute(at: OffsetDateTime) -> String {
    let seconds = u64::try_from(at.unix_timestamp()).unwrap_or(0);
    date::utc(seconds * 1000)[..16].to_owned()
}

fn authority(folder: &Path, valid: Duration) -> anyhow::Result<Made> {
    let (certificate, key_file) = (folder.join("ca.pem"), folder.join("ca-key.pem"));
    for file in [&certificate, &key_file] {
        let there = file.exists();
        ensure!(!there, "{} is there already: an authority is never overwritten; name another folder", file.display());
    }
    std::fs::create_dir_all(folder).with_context(|| format!("make the folder {}", folder.display()))?;
    let mut params = params(Vec::new(), valid)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    // Each has a name of its own, so that one can tell two authorities apart.
    let name = format!("elastic authority {}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
    params.distinguished_name.push(DnType::CommonName, &name);
    let (until, key) = (params.not_after, KeyPair::generate()?);
    let signed = params.self_signed(&key)?;
    write_new(&key_file, &key.serialize_pem(), SECRET)?;
    write_new(&certificate, &signed.pem(), PUBLIC)?;
    Ok(Made { name, certificate, key: key_file, until })
}

fn nodes(folder: &Path, names: &[String], valid: Duration, renew: bool) -> anyhow::Result<Vec<Made>> {
    let (ca_file, key_file) = (folder.join("ca.pem"), folder.join("ca-key.pem"));
    let advice = || format!("is there an authority in it? elasticctl certs authority {} makes one", folder.display());
    let (ca, ca_key) = (read(&ca_file).with_context(advice)?, read(&key_file).with_context(advice)?);
    let ends = ends(&ca).with_context(|| format!("read {}", ca_file.display()))?;
    let ca_key = KeyPair::from_pem(&ca_key).with_context(|| format!("read {}", key_file.display()))?;
    let issuer = Issuer::from_ca_cert_pem(&ca, ca_key).with_context(|| format!("read {}", ca_file.display()))?;

    let names = names.iter().map(|names| hosts(names)).collect::<anyhow::Result<Vec<_>>>()?;
    let files = |name: &str| (folder.join(format!("{name}.pem")), folder.join(format!("{name}-key.pem")));
    // Before the first is made.
    for file in names.iter().map(|hosts| files(&hosts[0])).flat_map(|(certificate, key)| [certificate, key]) {
        let (there, name) = (file.exists(), file.display());
        ensure!(renew || !there, "{name} is there already: --renew makes a new one, with the same key");
        ensure!(!renew || there, "{name} is not there: leave --renew out to make it");
    }
    let mut made = Vec::new();
    for hosts in names {
        let name = hosts[0].clone();
        let (certificate, key_file) = files(&name);
        let key = match renew {
            true => KeyPair::from_pem(&read(&key_file)?).with_context(|| format!("read {}", key_file.display()))?,
            false => KeyPair::generate()?,
        };
        let mut params = params(hosts, valid)?;
        params.not_after = params.not_after.min(ends);
        params.distinguished_name.push(DnType::CommonName, &name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // A node is both ends of connections.
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let until = params.not_after;
        let signed = params.signed_by(&key, &issuer)?.pem();
        if renew {
            replace(&certificate, &signed)?;
        } else {
            write_new(&key_file, &key.serialize_pem(), SECRET)?;
            write_new(&certificate, &signed, PUBLIC)?;
        }
        made.push(Made { name, certificate, key: key_file, until });
    }
    Ok(made)
}

fn params(hosts: Vec<String>, valid: Duration) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::new(hosts)?;
    let now = SystemTime::now();
    params.not_before = OffsetDateTime::from(now - CLOCKS);
    params.not_after = OffsetDateTime::from(now + valid);
    Ok(params)
}

fn ends(pem: &str) -> anyhow::Result<OffsetDateTime> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes())?;
    let (_, parsed) = X509Certificate::from_der(&der)?;
    Ok(parsed.validity().not_after.to_datetime())
}

/// The names of one certificate: the first names its files.
fn hosts(names: &str) -> anyhow::Result<Vec<String>> {
    let fits = |name: &str| {
        let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || "._-:".contains(c));
        letters && !name.is_empty() && !name.starts_with(['.', '-'])
    };
    let hosts: Vec<String> = names.split(',').map(str::to_owned).collect();
    match hosts.iter().find(|name| !fits(name)) {
        Some(name) => bail!("{name:?} is no name of a host: letters, digits and `._-:`"),
        None if hosts[0] == "ca" => bail!("the authority has that name: give the host's"),
        None => Ok(hosts),
    }
}

fn read(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn write_new(file: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(file).and_then(|mut open| {
        open.write_all(text.as_bytes())?;
        open.sync_all()
    });
    written.with_context(|| format!("write {}", file.display()))
}

/// In one step, so that anyone who reads the file finds the old text or the new one.
fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    let beside = file.with_extension("pem.new");
    match std::fs::remove_file(&beside) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            let left = || format!("cannot remove {}, which an interrupted renewal has left", beside.display());
            return Err(error).with_context(left);
        }
        _ => write_new(&beside, text, PUBLIC)?,
    }
    std::fs::rename(&beside, file).with_context(|| format!("write {}", file.display()))
}
