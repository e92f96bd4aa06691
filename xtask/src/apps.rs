//! `demo` and `bench`: programs of the crate `adit-tests`.

use std::{env, os::unix::process::CommandExt as _, process::ExitCode};

use anyhow::{Context as _, Result, bail};

use crate::{
    build,
    cluster::{self, programs::KUBERNETES},
    context::Context,
    packages::{self, Need},
    process::command,
};

/// Makes namespaces and links.
const IP: Need = Need {
    probe: "ip",
    package: "iproute2",
};

/// What the demo calls the certificate authority with.
const CA_CALLER: [Need; 2] = [
    Need {
        probe: "curl",
        package: "curl",
    },
    Need {
        probe: "openssl",
        package: "openssl",
    },
];

/// The demo's web server; without it, the demo has a small one of its own.
const WEB_SERVER: Need = Need {
    probe: "nginx",
    package: "nginx-light",
};

/// Arguments for the program itself.
#[derive(clap::Args)]
pub(crate) struct Passthrough {
    /// Arguments for the program; `--help` after the task's name shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<std::ffi::OsString>,
}

/// Builds everything and becomes the program `name`.
pub(crate) fn run(context: &Context, name: &str, passthrough: &Passthrough) -> Result<ExitCode> {
    let on_cluster = passthrough.arguments.iter().any(|argument| argument == "--cluster");
    let folder = if on_cluster { cluster::prepare(context)? } else { None };
    if name == "adit-demo" {
        let mut needs = vec![IP];
        needs.extend(CA_CALLER);
        if packages::can_install() {
            needs.push(WEB_SERVER);
        }
        packages::ensure(context, "the demo", &needs)?;
    } else {
        packages::ensure(context, "the bench", &[IP])?;
    }
    build::everything(context)?;
    let mut program = command(context, context.release(name));
    if !context.release(name).is_file() {
        bail!(
            "the build made no {}: is it still a binary of the crate adit-tests?",
            context.release(name).display()
        );
    }
    // Paths among the arguments are relative to where the user stands.
    program
        .current_dir(env::current_dir()?)
        .stdin(std::process::Stdio::inherit());
    program
        .env("ADIT_BIN", context.release("adit"))
        .env("ADIT_CACHE", &context.cache);
    KUBERNETES.tell(&mut program, folder.as_deref());
    program.args(&passthrough.arguments);
    let error = program.exec();
    Err(error).with_context(|| format!("starting {}", context.release(name).display()))
}
