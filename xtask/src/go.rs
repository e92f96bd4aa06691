//! Programs of other projects that are written in Go, at the versions that a module here pins: found, or built into the
//! cache.

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

/// The oldest Go whose builds are what the modules ask for, as a minor version of Go 1.
const GO: u32 = 26;

/// Programs that are wanted together.
pub(crate) struct Programs {
    /// What they are, for people.
    pub(crate) what: &'static str,
    /// The variable that names a folder with all of them, which then is the one that is used.
    pub(crate) variable: &'static str,
    /// Their folder in the cache.
    pub(crate) cache: &'static str,
    /// The module whose version is theirs; the first of [`Self::modules`] requires it.
    pub(crate) version_of: &'static str,
    /// What they are built from.
    pub(crate) modules: &'static [Module],
}

/// A module of this repository that pins what it builds.
pub(crate) struct Module {
    /// Its folder.
    pub(crate) folder: &'static str,
    /// What it has besides `go.mod` and `go.sum`.
    pub(crate) files: &'static [&'static str],
    /// Whether it is built with a C compiler.
    pub(crate) cgo: bool,
    /// What is built.
    pub(crate) builds: &'static [Build],
}

/// One file that is built.
pub(crate) struct Build {
    /// Its name.
    pub(crate) name: &'static str,
    /// The package that it is built from.
    pub(crate) package: &'static str,
    /// Flags for the linker; `VERSION` stands for the version.
    pub(crate) link: &'static str,
    /// The programs that it is, by the name it is started by, if it is not one by its own name.
    pub(crate) programs: &'static [&'static str],
}

impl Programs {
    /// Finds them, or builds them into the cache. Gives their folder if they are not on `PATH`.
    pub(crate) fn ensure(&self, context: &Context) -> Result<Option<PathBuf>> {
        if let Some(folder) = self.find(context)? {
            return Ok(Some(folder));
        }
        if self.are_on_path() {
            return Ok(None);
        }
        self.build(context).map(Some)
    }

    /// The folder with all of them: the one that the variable names, or that in the cache unless `PATH` has them.
    pub(crate) fn find(&self, context: &Context) -> Result<Option<PathBuf>> {
        let variable = self.variable;
        if let Some(folder) = env::var_os(variable).filter(|folder| !folder.is_empty()) {
            let folder = env::current_dir()?.join(folder);
            if let Some(name) = self.names().find(|name| !folder.join(name).is_file()) {
                bail!("{variable} names {}, where there is no {name}", folder.display());
            }
            return Ok(Some(folder));
        }
        let cached = self.cached(context)?;
        let has_all = self.names().all(|name| cached.join(name).is_file());
        Ok((!self.are_on_path() && has_all).then_some(cached))
    }

    /// Whether they need not be built.
    pub(crate) fn are_at_hand(&self, context: &Context) -> Result<bool> {
        Ok(self.find(context)?.is_some() || self.are_on_path())
    }

    /// Why they can be neither found nor built.
    pub(crate) fn obstacle(&self, context: &Context) -> Result<Option<String>> {
        if self.are_at_hand(context)? {
            return Ok(None);
        }
        Ok(self.go(context).err().map(|error| error.to_string()))
    }

    /// Tells a program where those are that [`Self::ensure`] has found in a folder.
    pub(crate) fn tell(&self, command: &mut Command, folder: Option<&Path>) {
        if let Some(folder) = folder {
            command.env(self.variable, folder);
        }
    }

    /// Whether `PATH` has all of them.
    fn are_on_path(&self) -> bool {
        self.names().all(|name| on_path(name).is_some())
    }

    fn builds(&self) -> impl Iterator<Item = (&Module, &Build)> {
        let modules = self.modules.iter();
        modules.flat_map(|module| module.builds.iter().map(move |build| (module, build)))
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        self.builds().flat_map(|(_, build)| match build.programs {
            [] => std::slice::from_ref(&build.name).iter().copied(),
            programs => programs.iter().copied(),
        })
    }

    /// Where the cache has them: by version, and by all that the build takes in.
    fn cached(&self, context: &Context) -> Result<PathBuf> {
        let mut sources = Vec::new();
        for module in self.modules {
            for name in module.files.iter().copied().chain(["go.mod", "go.sum"]) {
                let path = context.root.join(module.folder).join(name);
                sources.extend(fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
            }
        }
        let key = format!("{}-{}", self.version(context)?, &sha256(&sources)[..12]);
        Ok(context.cache.join(self.cache).join(key))
    }

    /// The version that is pinned.
    fn version(&self, context: &Context) -> Result<String> {
        let module = self.modules.first().context("there is no module")?;
        let path = context.root.join(module.folder).join("go.mod");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        version_in(&text, self.version_of)
            .with_context(|| format!("{} requires no {}", path.display(), self.version_of))
    }

    fn build(&self, context: &Context) -> Result<PathBuf> {
        let go = self.go(context)?;
        let (folder, version) = (self.cached(context)?, self.version(context)?);
        let title = format!(
            "build {} {version} (once, some minutes, into {})",
            self.what,
            folder.display()
        );
        step(&title, || {
            let draft = folder.with_extension(format!("{}", std::process::id()));
            let _ = fs::remove_dir_all(&draft);
            fs::create_dir_all(&draft).with_context(|| format!("making {}", draft.display()))?;
            for (module, build) in self.builds() {
                let mut command = module.go(context, &go);
                // Two compilers at a time: each may take a gigabyte.
                command.args(["build", "-p", "2", "-ldflags"]);
                command.arg(build.link.replace("VERSION", &version));
                run(command.arg("-o").arg(draft.join(build.name)).arg(build.package))?;
                for name in build.programs {
                    symlink(build.name, draft.join(name)).with_context(|| format!("naming {name}"))?;
                }
            }
            // Somebody else may have been quicker.
            let _ = fs::remove_dir_all(&folder);
            fs::rename(&draft, &folder).with_context(|| format!("naming {}", folder.display()))
        })?;
        Ok(folder)
    }

    /// A Go that is new enough.
    fn go(&self, context: &Context) -> Result<PathBuf> {
        let usual = PathBuf::from("/usr/local/go/bin/go");
        let found = on_path("go").or_else(|| usual.is_file().then_some(usual));
        let version = match (&found, self.modules.first()) {
            // One that is older, but not too old, gets the version that the module asks for.
            (Some(go), Some(module)) => output(module.go(context, go).args(["env", "GOVERSION"])).unwrap_or_default(),
            _ => String::new(),
        };
        match found {
            Some(go) if minor(&version).is_some_and(|minor| minor >= GO) => Ok(go),
            _ => bail!(
                "the programs of {} are neither named by {} nor on PATH, and to build them this machine lacks Go: \
                 install Go 1.{GO} or newer and put it on PATH",
                self.what,
                self.variable
            ),
        }
    }
}

impl Module {
    fn go(&self, context: &Context, go: &Path) -> Command {
        let mut command = command(context, go);
        command
            .current_dir(context.root.join(self.folder))
            .env("CGO_ENABLED", if self.cgo { "1" } else { "0" });
        command
    }
}

fn version_in(go_mod: &str, module: &str) -> Option<String> {
    let mut words = go_mod.split_whitespace().skip_while(|word| *word != module);
    Some(words.nth(1)?.strip_prefix('v')?.to_owned())
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
        assert_eq!(version_in(module, "k8s.io/kubernetes").as_deref(), Some("1.37.2"));
        assert_eq!(version_in("module x\n", "k8s.io/kubernetes"), None);
    }

    #[test]
    fn versions_of_go_compare_by_their_minor_number() {
        assert_eq!(minor("go1.26.8\n"), Some(26));
        assert_eq!(minor("go1.27rc1"), Some(27));
        assert_eq!(minor(""), None);
    }

    #[test]
    fn a_file_has_the_programs_that_it_is_or_its_own_name() {
        let one = |name, programs| Build {
            name,
            package: ".",
            link: "-s -w",
            programs,
        };
        let builds: &'static [Build] = Box::leak(Box::new([one("kube", &["kubelet", "kubectl"]), one("helm", &[])]));
        let modules: &'static [Module] = Box::leak(Box::new([Module {
            folder: "x",
            files: &[],
            cgo: false,
            builds,
        }]));
        let programs = Programs {
            what: "a cluster",
            variable: "X_BIN",
            cache: "x",
            version_of: "x",
            modules,
        };
        assert_eq!(programs.names().collect::<Vec<_>>(), ["kubelet", "kubectl", "helm"]);
    }
}
