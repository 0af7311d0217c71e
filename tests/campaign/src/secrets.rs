//! What a job needs where nothing is spoken in the open: certificates, users of etcd, and tokens that soon end.

use anyhow::{Context, Result};
use elastic_tests::prelude::*;
use etcd_client::{Certificate, Client, ConnectOptions, Identity, Permission, PermissionType, TlsOptions};

/// How long a token lasts, so that many end in each job.
const TOKEN: &str = "3s";

/// The user of agents and coordinators, and the user that makes users.
const USER: &str = "elastic";
const ROOT: &str = "root";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    Store,
    /// The nodes: one certificate, for etcd and for each other.
    Nodes,
}

#[derive(Clone)]
pub(crate) struct Secrets {
    certs: Arc<Certs>,
    folder: PathBuf,
}

impl Secrets {
    /// An authority, and certificates: etcd's members have these names and addresses.
    pub(crate) fn new(folder: &Path, members: Vec<String>) -> Result<Secrets> {
        let secrets = Secrets { certs: Arc::new(Certs::of_hosts(members)), folder: folder.to_owned() };
        for name in [USER, "tokens"] {
            std::fs::write(secrets.file(name), format!("the secret of {name}"))?;
        }
        Ok(secrets)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("secret-{name}"))
    }

    pub(crate) fn of_a_member(&self) -> Vec<String> {
        let Certs { ca, server: (certificate, key), .. } = &*self.certs;
        let flag = |name: &str, file: &Path| format!("--{name}={}", file.display());
        let tokens = self.file("tokens");
        vec![
            flag("trusted-ca-file", ca),
            flag("cert-file", certificate),
            flag("key-file", key),
            "--client-cert-auth".into(),
            "--bcrypt-cost=4".into(),
            format!("--auth-token=jwt,sign-method=HS256,priv-key={},ttl={TOKEN}", tokens.display()),
        ]
    }

    /// What an agent's `--rdzv-conf` says.
    pub(crate) fn of_an_agent(&self) -> String {
        let Certs { ca, client: (certificate, key), .. } = &*self.certs;
        let (ca, certificate, key) = (ca.display(), certificate.display(), key.display());
        format!("cacert={ca},cert={certificate},key={key},user={USER},password_file={}", self.file(USER).display())
    }

    pub(crate) fn of_a_coordinator(&self) -> Vec<String> {
        self.of_an_agent()
            .split(',')
            .map(|setting| format!("--{}", setting.replace("password_file", "password-file")))
            .collect()
    }

    /// Flags of agents and coordinators for their own connections.
    pub(crate) fn of_a_peer(&self) -> Vec<String> {
        let Certs { ca, client: (certificate, key), .. } = &*self.certs;
        [("cert", certificate), ("key", key), ("ca", ca)]
            .map(|(name, file)| format!("--peer-{name}={}", file.display()))
            .to_vec()
    }

    /// What the campaign itself connects with: as the user root, once etcd asks who it is.
    pub(crate) fn connect_with(&self, options: ConnectOptions, as_root: bool) -> Result<ConnectOptions> {
        let read = |file: &Path| std::fs::read(file).with_context(|| format!("read {}", file.display()));
        let Certs { ca, client: (certificate, key), .. } = &*self.certs;
        let identity = Identity::from_pem(read(certificate)?, read(key)?);
        let options =
            options.with_tls(TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca)?)).identity(identity));
        Ok(if as_root { options.with_user(ROOT, ROOT).with_auto_token_refresh(true) } else { options })
    }

    /// Makes the users, and has etcd ask for them from now on.
    pub(crate) async fn ask_for_users(&self, client: &mut Client) -> Result<()> {
        let password = std::fs::read_to_string(self.file(USER))?;
        for (user, password) in [(ROOT, ROOT), (USER, password.as_str())] {
            client.user_add(user, password, None).await?;
            client.role_add(user).await?;
            client.user_grant_role(user, user).await?;
        }
        let own = Permission::new(PermissionType::Readwrite, "/elastic/").with_prefix();
        client.role_grant_permission(USER, own).await?;
        client.auth_enable().await?;
        Ok(())
    }

    /// Takes the job's user its rights, or gives them back.
    pub(crate) async fn rights(&self, client: &mut Client, yes: bool) -> Result<()> {
        if yes {
            client.user_grant_role(USER, USER).await?;
        } else {
            client.user_revoke_role(USER, USER).await?;
        }
        Ok(())
    }

    /// Has etcd forget all tokens: setting a password does, also the same one.
    pub(crate) async fn forget_tokens(&self, client: &mut Client) -> Result<()> {
        client.user_change_password(USER, std::fs::read_to_string(self.file(USER))?).await?;
        Ok(())
    }

    /// Makes certificates again: one that has ended, or one that has not.
    pub(crate) fn renew(&self, holder: Holder, ended: bool) {
        const HOUR: Duration = Duration::from_secs(3600);
        let until = if ended { SystemTime::now() - HOUR } else { SystemTime::now() + 24 * HOUR };
        match holder {
            Holder::Store => self.certs.renew_server(until),
            Holder::Nodes => self.certs.renew_client(until),
        }
    }
}
