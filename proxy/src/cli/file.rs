//! The configuration file: one layer over any clap command, below flags and environment variables.
//!
//! A key of the file is the name of a flag. Keys that neither a flag nor a variable sets are put into the command line,
//! which clap then reads as if they had been typed: the same parsers, the same defaults, the same errors.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ContextKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use thiserror::Error;

use super::CliError;

/// The flag that names the file.
const CONFIG: &str = "config";

/// Why a configuration file cannot be used.
#[derive(Debug, Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read the configuration file {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not a YAML mapping of names to values.
    #[error("{}{location}: not a configuration file, which is YAML lines of `name: value`: {reason}", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Where in it: `:line:column`, or nothing where that is unknown.
        location: String,
        /// What is wrong there.
        reason: String,
    },
    /// A key is not the name of a flag.
    #[error("{}: unknown key `{key}`; `{command}` knows {known}", file.display())]
    UnknownKey {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// The command that was to be run.
        command: String,
        /// The keys that it knows.
        known: String,
    },
    /// A value is not what its flag takes.
    #[error("{}: key `{key}`: {reason}", file.display())]
    Value {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What is wrong with the value.
        reason: String,
    },
}

/// Reads `args` by `command`, with the configuration file that they or the environment name.
pub(super) fn matches(command: Command, mut args: Vec<OsString>) -> Result<ArgMatches, CliError> {
    // A first reading, blind to errors, finds the file and what is set without it. It fails only where help or the
    // version is asked for, which the second reading then answers.
    let Ok(probe) = command.clone().ignore_errors(true).try_get_matches_from(&args) else {
        return Ok(command.try_get_matches_from(args)?);
    };
    let (leaf, set) = leaf(&command, &probe);
    let has_file = leaf.get_arguments().any(|arg| arg.get_id() == CONFIG);
    let Some(file) = has_file.then(|| set.get_one::<PathBuf>(CONFIG)).flatten() else {
        return Ok(command.try_get_matches_from(args)?);
    };
    let values = read(file)?;
    let inserted = arguments(leaf, set, file, &values)?;
    // Before a `--`, after which nothing is a flag.
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    let keys: Vec<String> = inserted.iter().map(|(key, _)| key.clone()).collect();
    args.splice(end..end, inserted.into_iter().map(|(_, argument)| argument));
    let file = file.clone();
    command
        .try_get_matches_from(args)
        .map_err(|error| blame(error, &file, &keys))
}

/// The command that is to be run, at the end of the chain of subcommands, and what is set for it.
fn leaf<'a>(mut command: &'a Command, mut matches: &'a ArgMatches) -> (&'a Command, &'a ArgMatches) {
    while let Some((name, below)) = matches.subcommand() {
        let Some(subcommand) = command.find_subcommand(name) else {
            break;
        };
        (command, matches) = (subcommand, below);
    }
    (command, matches)
}

fn read(file: &Path) -> Result<BTreeMap<String, Values>, FileError> {
    let text = std::fs::read_to_string(file).map_err(|source| FileError::Read {
        file: file.into(),
        source,
    })?;
    parse(&text).map_err(|error| FileError::Syntax {
        file: file.into(),
        location: error
            .location()
            .map_or_else(String::new, |at| format!(":{}:{}", at.line(), at.column())),
        reason: one_line(&error.without_snippet().to_string()),
    })
}

fn parse(text: &str) -> Result<BTreeMap<String, Values>, serde_saphyr::Error> {
    // A file of comments alone sets nothing.
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
    {
        return Ok(BTreeMap::new());
    }
    // Scalars as they are written: YAML would make `off` a boolean and 1.10 a number.
    if let Ok(values) = serde_saphyr::from_str::<BTreeMap<String, String>>(text) {
        return Ok(values
            .into_iter()
            .map(|(key, value)| (key, Values(vec![value])))
            .collect());
    }
    serde_saphyr::from_str(text)
}

/// A value, or a list of them for a flag that may be given several times.
#[derive(Debug, PartialEq, Eq)]
struct Values(Vec<String>);

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;

        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Values;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a value or a list of values")
            }

            fn visit_str<E>(self, value: &str) -> Result<Values, E> {
                Ok(Values(vec![value.into()]))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Values, E> {
                Ok(Values(vec![value.to_string()]))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Values, E> {
                Ok(Values(vec![value.to_string()]))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Values, E> {
                Ok(Values(vec![value.to_string()]))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Values, E> {
                Ok(Values(vec![value.to_string()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Values, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = list.next_element()? {
                    values.push(value);
                }
                Ok(Values(values))
            }
        }

        deserializer.deserialize_any(OneOrMany)
    }
}

/// The file's keys as arguments, without those that a flag or a variable sets.
fn arguments(
    command: &Command,
    set: &ArgMatches,
    file: &Path,
    values: &BTreeMap<String, Values>,
) -> Result<Vec<(String, OsString)>, FileError> {
    let mut arguments = Vec::new();
    for (key, Values(values)) in values {
        let Some(arg) = flags(command).find(|arg| arg.get_long() == Some(key)) else {
            return Err(FileError::UnknownKey {
                file: file.into(),
                key: key.clone(),
                command: command.get_name().into(),
                known: flags(command).filter_map(Arg::get_long).collect::<Vec<_>>().join(", "),
            });
        };
        let refuse = |reason: &str| {
            Err(FileError::Value {
                file: file.into(),
                key: key.clone(),
                reason: reason.into(),
            })
        };
        let source = set.value_source(arg.get_id().as_str());
        let is_set = matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable));
        match (arg.get_action(), values.as_slice()) {
            (ArgAction::SetTrue, [value]) => match value.as_str() {
                "true" if is_set => {}
                "true" => arguments.push((key.clone(), format!("--{key}").into())),
                "false" => {}
                _ => return refuse("must be true or false"),
            },
            (ArgAction::Set, [_]) | (ArgAction::Append, _) if is_set => {}
            (ArgAction::Set, [value]) => arguments.push((key.clone(), format!("--{key}={value}").into())),
            (ArgAction::Append, values) => {
                arguments.extend(
                    values
                        .iter()
                        .map(|value| (key.clone(), format!("--{key}={value}").into())),
                );
            }
            _ => return refuse("takes one value, not a list"),
        }
    }
    Ok(arguments)
}

fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| {
        arg.get_long()
            .is_some_and(|long| !matches!(long, CONFIG | "help" | "version"))
    })
}

/// Lays an error about a value that came from the file at the file's door; it would read as if it had been typed.
fn blame(error: clap::Error, file: &Path, keys: &[String]) -> CliError {
    let about = error
        .get(ContextKind::InvalidArg)
        .map(ToString::to_string)
        .unwrap_or_default();
    let flag = about.split([' ', '=']).next().unwrap_or_default();
    let Some(key) = keys.iter().find(|key| flag.strip_prefix("--") == Some(key)) else {
        return error.into();
    };
    let mut reason = match error.get(ContextKind::InvalidValue) {
        Some(value) => format!("invalid value `{value}`"),
        None => one_line(&error.kind().to_string()),
    };
    if let Some(source) = error.source() {
        reason = format!("{reason}: {source}");
    }
    if let Some(valid) = error.get(ContextKind::ValidValue) {
        reason = format!("{reason}: must be one of {valid}");
    }
    FileError::Value {
        file: file.into(),
        key: key.clone(),
        reason,
    }
    .into()
}

fn one_line(text: &str) -> String {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::value_parser;

    /// A command with every kind of flag; one has a variable that cargo always sets for tests.
    fn command() -> Command {
        let leaf = Command::new("leaf")
            .arg(Arg::new("config").long("config").value_parser(value_parser!(PathBuf)))
            .arg(Arg::new("node_name").long("node-name").required(true))
            .arg(Arg::new("by_env").long("by-env").env("PATH"))
            .arg(
                Arg::new("workers")
                    .long("workers")
                    .value_parser(value_parser!(u16))
                    .default_value("1"),
            )
            .arg(Arg::new("mode").long("mode").value_parser(["on", "off"]))
            .arg(Arg::new("many").long("many").action(ArgAction::Append))
            .arg(Arg::new("loud").long("loud").action(ArgAction::SetTrue));
        Command::new("adit").subcommand(leaf)
    }

    fn run(text: &str, more: &[&str]) -> Result<ArgMatches, CliError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.yaml");
        std::fs::write(&file, text).unwrap();
        let mut args: Vec<OsString> = ["adit", "leaf", "--config"].map(OsString::from).to_vec();
        args.push(file.into());
        args.extend(more.iter().map(OsString::from));
        matches(command(), args).map(|matches| matches.subcommand().unwrap().1.clone())
    }

    fn one(matches: &ArgMatches, id: &str) -> String {
        matches.get_one::<String>(id).cloned().unwrap_or_default()
    }

    #[test]
    fn a_file_stands_below_flags_and_variables_and_above_defaults() {
        let text = "node-name: file\nby-env: file\nworkers: 7\n";
        let matches = run(text, &["--node-name", "flag"]).unwrap();
        assert_eq!(one(&matches, "node_name"), "flag");
        assert_eq!(one(&matches, "by_env"), std::env::var("PATH").unwrap());
        assert_eq!(matches.get_one::<u16>("workers"), Some(&7));
        let matches = run("node-name: file\n", &[]).unwrap();
        assert_eq!(
            (one(&matches, "node_name").as_str(), matches.get_one::<u16>("workers")),
            ("file", Some(&1))
        );
    }

    #[test]
    fn scalars_are_taken_as_they_are_written() {
        for (yaml, expected) in [
            ("0123", "0123"),
            ("1.10", "1.10"),
            ("'a b'", "a b"),
            ("off", "off"),
            ("a=b", "a=b"),
            ("-x", "-x"),
        ] {
            let matches = run(&format!("node-name: {yaml}\n"), &[]).unwrap();
            assert_eq!(one(&matches, "node_name"), expected, "{yaml}");
        }
    }

    #[test]
    fn lists_and_switches_are_flags_too() {
        let matches = run("node-name: n\nmany: [a, b]\nloud: true\n", &[]).unwrap();
        assert_eq!(
            matches.get_many::<String>("many").unwrap().collect::<Vec<_>>(),
            ["a", "b"]
        );
        assert!(matches.get_flag("loud"));
        assert!(!run("node-name: n\nloud: false\n", &[]).unwrap().get_flag("loud"));
    }

    #[test]
    fn an_unknown_key_names_itself_the_file_and_the_known_keys() {
        let error = run("node-name: n\nnode_name: n\n", &[]).unwrap_err();
        assert!(matches!(&error, CliError::File(FileError::UnknownKey { key, .. }) if key == "node_name"));
        let text = error.to_string();
        assert!(text.contains("c.yaml: unknown key `node_name`"), "{text}");
        assert!(text.contains("node-name, by-env, workers, mode, many, loud"), "{text}");
        for key in ["config", "help"] {
            let error = run(&format!("{key}: x\n"), &["--node-name=n"]).unwrap_err();
            assert!(matches!(error, CliError::File(FileError::UnknownKey { .. })), "{key}");
        }
    }

    #[test]
    fn a_bad_value_is_laid_at_the_files_door() {
        for (line, expected) in [
            ("workers: many", "key `workers`: invalid value `many`"),
            ("workers: 99999", "key `workers`: invalid value `99999`"),
            (
                "mode: maybe",
                "key `mode`: invalid value `maybe`: must be one of on, off",
            ),
            ("workers: [1, 2]", "key `workers`: takes one value, not a list"),
            ("loud: very", "key `loud`: must be true or false"),
        ] {
            let error = run(&format!("node-name: n\n{line}\n"), &[]).unwrap_err();
            assert!(
                matches!(error, CliError::File(FileError::Value { .. })),
                "{line}: {error}"
            );
            assert!(error.to_string().contains(expected), "{line}: {error}");
        }
        assert!(matches!(
            run("node-name: n\n", &["--workers=x"]).unwrap_err(),
            CliError::Usage(_)
        ));
    }

    #[test]
    fn malformed_files_are_refused() {
        for text in [
            "node-name",
            "- a\n- b\n",
            "node-name: {a: b}\n",
            "node-name: [[a]]\n",
            "a: b: c\n",
            "node-name: a\nnode-name: b\n",
            "node-name: \"a\n",
            "\u{0}",
            "node-name:\n",
            "node-name: null\n",
            "a: &a [x, *a]\n",
        ] {
            let Err(error) = run(text, &[]) else {
                panic!("accepted: {text:?}")
            };
            assert!(
                matches!(
                    error,
                    CliError::File(FileError::Syntax { .. } | FileError::Value { .. })
                ),
                "{text:?}: {error}"
            );
            assert!(error.to_string().contains("c.yaml"), "{text:?}: {error}");
            assert!(!error.to_string().contains('\n'), "{text:?}: {error}");
        }
    }

    #[test]
    fn an_empty_file_sets_nothing() {
        for text in ["", "\n", "# node-name: a\n"] {
            assert_eq!(one(&run(text, &["--node-name=n"]).unwrap(), "node_name"), "n");
        }
    }

    #[test]
    fn flags_after_a_double_dash_do_not_swallow_the_file() {
        assert!(matches!(
            run("node-name: n\n", &["--", "x"]).unwrap_err(),
            CliError::Usage(_)
        ));
    }
}
