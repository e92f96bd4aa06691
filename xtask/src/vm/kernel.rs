//! Debian's kernels: finding the newest of a series, and taking it out of its package without installing it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    context::{Context, say, step},
    packages::apt,
    process::{command, output, run},
    vm::modules::{self, Dependencies},
};

/// The small build for virtual machines.
const FLAVOUR: &str = "-cloud-amd64";

/// A kernel in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// Its release, such as `6.1.0-50-cloud-amd64`.
    pub(crate) version: String,
    /// The folder with its image and modules.
    folder: PathBuf,
}

impl Kernel {
    /// Its release without what is the same for all, such as `6.1.0-50`.
    pub(crate) fn name(&self) -> &str {
        self.version.strip_suffix(FLAVOUR).unwrap_or(&self.version)
    }

    /// The bootable image.
    pub(crate) fn image(&self) -> PathBuf {
        self.folder.join(format!("boot/vmlinuz-{}", self.version))
    }

    /// The files of the modules that the tests need, in the order to load them.
    pub(crate) fn modules(&self) -> Result<Vec<PathBuf>> {
        let folder = self.modules_folder();
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        let (dependencies, builtin) = (read("modules.dep")?, read("modules.builtin")?);
        let order = Dependencies::parse(&dependencies).load_order(modules::WANTED, &builtin)?;
        Ok(order.into_iter().map(|path| folder.join(path)).collect())
    }

    fn modules_folder(&self) -> PathBuf {
        // Newer packages hold /usr/lib/modules.
        let usr = self.folder.join("usr/lib/modules").join(&self.version);
        if usr.is_dir() {
            usr
        } else {
            self.folder.join("lib/modules").join(&self.version)
        }
    }
}

/// The newest kernel of a series, from the cache or from Debian. Where Debian cannot be asked, the newest one in the
/// cache serves.
pub(crate) fn fetch(context: &Context, series: &str) -> Result<Kernel> {
    let store = context.cache.join("kernels");
    fs::create_dir_all(&store).with_context(|| format!("making {}", store.display()))?;
    let cached = newest(series, names_in(&store).iter().map(String::as_str));
    let offered = match offered(context, series)? {
        Some(version) => Some(version),
        // A fresh machine has no package lists yet.
        None if cached.is_none() => {
            step(
                "refresh the package lists",
                || run(apt(context).args(["update", "-qq"])),
            )?;
            offered(context, series)?
        }
        None => None,
    };
    let Some(version) = offered.or_else(|| cached.clone()) else {
        bail!(
            "Debian's package lists offer no kernel linux-image-{series}.*-cloud-amd64 (needed to test on it); on \
             another system, unpack such a package into {}/<version>",
            store.display()
        );
    };
    let kernel = Kernel {
        folder: store.join(&version),
        version,
    };
    if kernel.folder.is_dir() {
        return Ok(kernel);
    }
    match download(context, &store, &kernel) {
        Ok(()) => Ok(kernel),
        Err(error) => {
            let Some(version) = cached else { return Err(error) };
            say(&format!("    {error:#}\n    using {version} from the cache instead"));
            Ok(Kernel {
                folder: store.join(&version),
                version,
            })
        }
    }
}

fn offered(context: &Context, series: &str) -> Result<Option<String>> {
    let names = output(command(context, "apt-cache").args(["pkgnames", &format!("linux-image-{series}")]))?;
    Ok(newest(
        series,
        names.lines().filter_map(|name| name.strip_prefix("linux-image-")),
    ))
}

/// Downloads and unpacks a kernel; it appears in the store as a whole.
fn download(context: &Context, store: &Path, kernel: &Kernel) -> Result<()> {
    step(
        &format!("fetch the kernel {} (once, into {})", kernel.version, store.display()),
        || {
            let draft = store.join(format!(".{}.{}", kernel.version, std::process::id()));
            let _ = fs::remove_dir_all(&draft);
            fs::create_dir_all(&draft)?;
            let package = format!("linux-image-{}", kernel.version);
            let mut download = apt(context);
            // As the user that we are: apt's own may not read the cache folder.
            download
                .args(["download", "-qq", "-o", "APT::Sandbox::User=", &package])
                .current_dir(&draft);
            if run(&mut download).is_err() {
                // The lists may be older than the archive.
                run(apt(context).args(["update", "-qq"]))?;
                run(&mut download)?;
            }
            let file = names_in(&draft)
                .into_iter()
                .next()
                .context("apt-get download left no file")?;
            run(command(context, "dpkg").arg("-x").arg(draft.join(&file)).arg(&draft))?;
            fs::remove_file(draft.join(&file))?;
            let unpacked = Kernel {
                version: kernel.version.clone(),
                folder: draft.clone(),
            };
            let base = if draft.join("usr/lib/modules").is_dir() {
                draft.join("usr")
            } else {
                draft.clone()
            };
            run(command(
                context,
                crate::process::find("depmod").context("depmod is not installed")?,
            )
            .arg("-b")
            .arg(base)
            .arg(&kernel.version))?;
            unpacked.modules()?;
            fs::rename(&draft, &kernel.folder).with_context(|| format!("making {}", kernel.folder.display()))
        },
    )
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// The newest of those versions that are cloud kernels of the series.
fn newest<'a>(series: &str, versions: impl Iterator<Item = &'a str>) -> Option<String> {
    versions
        .filter(|version| is_cloud_kernel(series, version))
        .max_by_key(|version| numbers(version))
        .map(str::to_owned)
}

/// `6.1.0-50-cloud-amd64` and `6.12.117+deb12-cloud-amd64`, but neither `…-dbg` nor `…-unsigned` nor `6.12-cloud-amd64`.
fn is_cloud_kernel(series: &str, version: &str) -> bool {
    let inner = version.strip_prefix(series).and_then(|rest| rest.strip_prefix('.'));
    inner.and_then(|rest| rest.strip_suffix(FLAVOUR)).is_some_and(|rest| {
        rest.starts_with(|first: char| first.is_ascii_digit())
            && !rest.contains("rt")
            && rest.chars().all(|c| c.is_ascii_alphanumeric() || ".+-".contains(c))
    })
}

fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_of_a_series_is_taken_by_number() {
        let offered = [
            "6.1.0-9-cloud-amd64",
            "6.1.0-50-cloud-amd64",
            "6.1.0-57-cloud-amd64-dbg",
            "6.1.0-57-cloud-amd64-unsigned",
            "6.12.117+deb12-cloud-amd64",
            "6.12.99+deb12-cloud-amd64",
            "6.12-cloud-amd64",
            "6.1.0-60-amd64",
        ];
        assert_eq!(
            newest("6.1", offered.into_iter()).as_deref(),
            Some("6.1.0-50-cloud-amd64")
        );
        assert_eq!(
            newest("6.12", offered.into_iter()).as_deref(),
            Some("6.12.117+deb12-cloud-amd64")
        );
        assert_eq!(newest("6.6", offered.into_iter()), None);
    }
}
