//! Units of systemd, read from their files and started as systemd would: command line, environment, user, rights, limits,
//! directories and credentials.

use elastic_tests::prelude::*;

use crate::deploy::machines::Machine;

/// A unit as installed on a machine. `name` may have an instance: `elastic-train-agent@digits`.
pub(super) struct Unit {
    name: String,
    instance: String,
    entries: Vec<(String, String)>,
}

impl Unit {
    /// Reads it where systemd looks: what is installed by hand, then what packages bring.
    pub(super) fn read(machine: &Machine, name: &str) -> Unit {
        let (file, instance) = match name.split_once('@') {
            Some((template, instance)) => (format!("{template}@.service"), instance),
            None => (format!("{name}.service"), ""),
        };
        let folders = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
        let text =
            folders.iter().find_map(|folder| std::fs::read_to_string(machine.path(&format!("{folder}/{file}"))).ok());
        let text = text.unwrap_or_else(|| panic!("{file} is not installed on {}", machine.name));
        Unit { name: name.to_owned(), instance: instance.to_owned(), entries: entries(&text) }
    }

    /// All values of a key; an empty one takes those before it back.
    fn all(&self, key: &str) -> Vec<String> {
        let mut values = Vec::new();
        for (_, value) in self.entries.iter().filter(|(name, _)| name == key) {
            if value.is_empty() {
                values.clear();
            } else {
                values.push(self.specified(value));
            }
        }
        values
    }

    fn last(&self, key: &str) -> Option<String> {
        self.all(key).pop()
    }

    fn specified(&self, value: &str) -> String {
        let name = self.name.split('@').next().unwrap_or_default();
        value.replace("%i", &self.instance).replace("%p", name).replace("%n", &format!("{}.service", self.name))
    }

    pub(super) fn stop_timeout(&self) -> Duration {
        Duration::from_secs(self.last("TimeoutStopSec").map_or(90, |value| value.parse().expect("seconds")))
    }

    fn environment(&self, machine: &Machine, user: &str) -> BTreeMap<String, String> {
        let mut environment = BTreeMap::from([
            ("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin".to_owned()),
            ("HOSTNAME".to_owned(), machine.name.clone()),
            ("USER".to_owned(), user.to_owned()),
        ]);
        for words in self.all("Environment") {
            for word in words.split_whitespace() {
                let (name, value) = word.split_once('=').expect("NAME=VALUE in Environment=");
                environment.insert(name.to_owned(), value.replace("%H", &machine.name));
            }
        }
        for file in self.all("EnvironmentFile") {
            let (path, optional) = file.strip_prefix('-').map_or((&*file, false), |path| (path, true));
            match std::fs::read_to_string(machine.path(path)) {
                Ok(text) => environment.extend(settings(&text)),
                Err(error) => assert!(optional, "{path} on {}: {error}", machine.name),
            }
        }
        environment
    }

    /// The command of its `ExecStart`: `$NAME` as a word of its own is split at blanks.
    fn command(&self, environment: &BTreeMap<String, String>) -> Vec<String> {
        let line = self.last("ExecStart").expect("an ExecStart");
        let word = |word: &str| match word.strip_prefix('$') {
            Some(name) => {
                environment.get(name).map_or("", |value| value).split_whitespace().map(str::to_owned).collect()
            }
            None => vec![word.to_owned()],
        };
        line.split_whitespace().flat_map(word).collect()
    }

    /// The whole command line that runs it on the machine, once its directories and credentials are there.
    pub(super) fn launch(&self, machine: &Machine) -> Vec<String> {
        let dynamic = self.last("DynamicUser").as_deref() == Some("yes");
        // Systemd makes a user for it, which no file names.
        let user = if dynamic { "62017".to_owned() } else { self.last("User").unwrap_or_else(|| "root".into()) };
        let group = if dynamic { user.clone() } else { self.last("Group").unwrap_or_else(|| user.clone()) };
        self.prepare(machine, &user, &group);

        let mut launch: Vec<String> = ["env", "-i"].map(str::to_owned).to_vec();
        let environment = self.environment(machine, &user);
        launch.extend(environment.iter().map(|(name, value)| format!("{name}={value}")));
        let limit = self.last("LimitNOFILE").unwrap_or_else(|| "1024".into());
        let (mask, folder) = (self.last("UMask"), self.last("WorkingDirectory"));
        let shell = format!(
            // A container may be allowed fewer descriptors than the unit asks for.
            "ulimit -n {limit} 2>/dev/null || ulimit -n $(ulimit -Hn); umask {}; cd {} && exec \"$@\"",
            mask.as_deref().unwrap_or("0022"),
            folder.as_deref().unwrap_or("/")
        );
        launch.extend(["sh", "-c", &shell, "sh", "setpriv", "--pdeathsig=KILL"].map(str::to_owned));
        launch.extend([format!("--reuid={user}"), format!("--regid={group}")]);
        launch.push(if dynamic { "--clear-groups" } else { "--init-groups" }.to_owned());
        if self.last("NoNewPrivileges").as_deref() == Some("yes") {
            launch.push("--no-new-privs".to_owned());
        }
        if self.entries.iter().any(|(key, value)| key == "CapabilityBoundingSet" && value.is_empty()) {
            launch.extend(["--bounding-set=-all", "--inh-caps=-all"].map(str::to_owned));
        }
        launch.push("--".to_owned());
        launch.extend(self.command(&environment));
        launch
    }

    fn prepare(&self, machine: &Machine, user: &str, group: &str) {
        if let Some(name) = self.last("RuntimeDirectory") {
            let mode = self.last("RuntimeDirectoryMode").unwrap_or_else(|| "0755".into());
            machine.run(&format!("install -d -o {user} -g {group} -m {mode} /run/{name}"));
        }
        let folder = format!("/run/credentials/{}.service", self.name);
        for credential in self.all("LoadCredential") {
            let (name, source) = credential.split_once(':').expect("NAME:PATH in LoadCredential=");
            machine.run(&format!(
                "install -d -o {user} -g {group} -m 500 {folder} && \
                 install -o {user} -g {group} -m 400 {source} {folder}/{name}"
            ));
        }
    }
}

/// The entries of a unit's file, in order.
fn entries(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', '[']));
    lines
        .map(|line| {
            let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("no entry of a unit: {line}"));
            (key.to_owned(), value.to_owned())
        })
        .collect()
}

fn settings(text: &str) -> impl Iterator<Item = (String, String)> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| {
        let (name, value) = line.split_once('=').unwrap_or_else(|| panic!("no variable: {line}"));
        (name.to_owned(), value.trim_matches('"').to_owned())
    })
}
