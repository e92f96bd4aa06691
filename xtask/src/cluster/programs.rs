//! The programs of a cluster: Kubernetes, etcd and Helm, at the versions that `tests/cluster/` pins.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use xtask::archive::sha256;

use crate::{
    context::{Context, step},
    process::{command, find as on_path, output, run},
};

/// Names a folder with all of them, which then is the one that is used.
pub(crate) const FOLDER: &str = "ADIT_K8S_BIN";

/// Those that one file is, by its names.
const KUBERNETES: [&str; 7] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
];
const HELM: &str = "helm";

/// What the result depends on.
const SOURCES: [&str; 5] = [
    "kube/main.go",
    "kube/go.mod",
    "kube/go.sum",
    "helm/go.mod",
    "helm/go.sum",
];

/// The oldest Go whose builds are what the modules ask for, as a minor version of Go 1.
const GO: u32 = 26;

/// Finds them, or builds them into the cache. Gives their folder if they are not on `PATH`.
pub(crate) fn ensure(context: &Context) -> Result<Option<PathBuf>> {
    if let Some(folder) = find(context)? {
        return Ok(Some(folder));
    }
    if are_on_path() {
        return Ok(None);
    }
    build(context).map(Some)
}

/// The folder with all of them: the one that `ADIT_K8S_BIN` names, or that in the cache unless `PATH` has them.
pub(crate) fn find(context: &Context) -> Result<Option<PathBuf>> {
    if let Some(folder) = env::var_os(FOLDER).filter(|folder| !folder.is_empty()) {
        let folder = env::current_dir()?.join(folder);
        if let Some(name) = all().find(|name| !folder.join(name).is_file()) {
            bail!("{FOLDER} names {}, where there is no {name}", folder.display());
        }
        return Ok(Some(folder));
    }
    let cached = cached(context)?;
    Ok((!are_on_path() && all().all(|name| cached.join(name).is_file())).then_some(cached))
}

/// Whether they need not be built.
pub(crate) fn are_at_hand(context: &Context) -> Result<bool> {
    Ok(find(context)?.is_some() || are_on_path())
}

/// Why they can be neither found nor built.
pub(crate) fn obstacle(context: &Context) -> Result<Option<String>> {
    if are_at_hand(context)? {
        return Ok(None);
    }
    Ok(go(context).err().map(|error| error.to_string()))
}

/// Whether `PATH` has all of them.
fn are_on_path() -> bool {
    all().all(|name| on_path(name).is_some())
}

fn all() -> impl Iterator<Item = &'static str> {
    KUBERNETES.into_iter().chain([HELM])
}

fn modules(context: &Context) -> PathBuf {
    context.root.join("tests/cluster")
}

/// Where the cache has them: by version, and by all that the build takes in.
fn cached(context: &Context) -> Result<PathBuf> {
    let mut sources = Vec::new();
    for name in SOURCES {
        let path = modules(context).join(name);
        sources.extend(fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
    }
    let key = format!("{}-{}", version(context)?, &sha256(&sources)[..12]);
    Ok(context.cache.join("k8s").join(key))
}

/// The version of Kubernetes that is pinned.
fn version(context: &Context) -> Result<String> {
    let path = modules(context).join("kube/go.mod");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    version_in(&text).with_context(|| format!("{} requires no k8s.io/kubernetes", path.display()))
}

fn version_in(go_mod: &str) -> Option<String> {
    let mut words = go_mod
        .split_whitespace()
        .skip_while(|word| *word != "k8s.io/kubernetes");
    Some(words.nth(1)?.strip_prefix('v')?.to_owned())
}

fn build(context: &Context) -> Result<PathBuf> {
    let go = go(context)?;
    let (folder, version) = (cached(context)?, version(context)?);
    let title = format!(
        "build Kubernetes {version} and Helm (once, some minutes, into {})",
        folder.display()
    );
    step(&title, || {
        let draft = folder.with_extension(format!("{}", std::process::id()));
        let _ = fs::remove_dir_all(&draft);
        fs::create_dir_all(&draft).with_context(|| format!("making {}", draft.display()))?;
        let stamp = format!("-s -w -X k8s.io/component-base/version.gitVersion=v{version}");
        go_build(context, &go, "kube", &stamp, &draft.join("kube"), ".")?;
        for name in KUBERNETES {
            symlink("kube", draft.join(name)).with_context(|| format!("naming {name}"))?;
        }
        go_build(
            context,
            &go,
            "helm",
            "-s -w",
            &draft.join(HELM),
            "helm.sh/helm/v4/cmd/helm",
        )?;
        // Somebody else may have been quicker.
        let _ = fs::remove_dir_all(&folder);
        fs::rename(&draft, &folder).with_context(|| format!("naming {}", folder.display()))
    })?;
    Ok(folder)
}

fn go_build(context: &Context, go: &Path, module: &str, link: &str, to: &Path, package: &str) -> Result<()> {
    let mut build = in_module(context, go, module);
    // Two compilers at a time: each may take a gigabyte.
    build
        .args(["build", "-p", "2", "-ldflags", link, "-o"])
        .arg(to)
        .arg(package);
    run(&mut build)
}

fn in_module(context: &Context, go: &Path, module: &str) -> Command {
    let mut command = command(context, go);
    command
        .current_dir(modules(context).join(module))
        .env("CGO_ENABLED", "0");
    command
}

/// A Go that is new enough.
fn go(context: &Context) -> Result<PathBuf> {
    let usual = PathBuf::from("/usr/local/go/bin/go");
    let found = on_path("go").or_else(|| usual.is_file().then_some(usual));
    let version = match &found {
        // One that is older, but not too old, gets the version that the module asks for.
        Some(go) => output(in_module(context, go, "kube").args(["env", "GOVERSION"])).unwrap_or_default(),
        None => String::new(),
    };
    match found {
        Some(go) if minor(&version).is_some_and(|minor| minor >= GO) => Ok(go),
        _ => bail!(
            "the programs of a Kubernetes cluster are neither named by {FOLDER} nor on PATH, and to build them this \
             machine lacks Go: install Go 1.{GO} or newer and put it on PATH"
        ),
    }
}

/// 26 of `go1.26.8`.
fn minor(version: &str) -> Option<u32> {
    let rest = version.trim().strip_prefix("go1.")?;
    rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pinned_version_is_read_from_the_module() {
        let module = "module x\n\nrequire (\n\tk8s.io/kubectl v0.37.2\n\tk8s.io/kubernetes v1.37.2\n)\n";
        assert_eq!(version_in(module).as_deref(), Some("1.37.2"));
        assert_eq!(version_in("module x\n"), None);
    }

    #[test]
    fn versions_of_go_compare_by_their_minor_number() {
        assert_eq!(minor("go1.26.8\n"), Some(26));
        assert_eq!(minor("go1.27rc1"), Some(27));
        assert_eq!(minor(""), None);
    }
}
