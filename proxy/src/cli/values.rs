//! Values of flags that clap does not know by itself.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;
use tracing_subscriber::EnvFilter;

/// Why a flag's value is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ValueError {
    /// Not a number with a unit of time.
    #[error("a duration is a whole number and a unit, such as 500ms, 10s, 2m, 24h")]
    Duration,
    /// Zero where that makes no sense.
    #[error("must be more than zero")]
    Zero,
    /// Not a number of bytes that HTTP/2 can express.
    #[error("a size is a whole number with or without KiB, MiB or GiB, from 64KiB to less than 2GiB")]
    Bytes,
    /// Not `none`, `all` or a pod's name.
    #[error("must be none, all, or a pod as NAMESPACE/NAME")]
    Pods,
    /// Not a map and a number.
    #[error("a map's name and a number, such as adit_flows=10")]
    MapEntries,
    /// Not a filter; the text says why.
    #[error("not a log filter: {0}; one is, for example, info or warn,adit::hbone=debug")]
    Filter(String),
}

/// Parses `500ms`, `10s`, `2m` or `24h`.
pub fn parse_duration(text: &str) -> Result<Duration, ValueError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| ValueError::Duration)?;
    let milliseconds = match unit {
        "ms" => Some(number),
        "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => None,
    };
    // A hundred years and no more: deadlines are added to the clock, which must not overflow.
    milliseconds
        .filter(|ms| *ms <= 100 * 366 * 24 * 3_600_000)
        .map(Duration::from_millis)
        .ok_or(ValueError::Duration)
}

/// [`parse_duration`], for what cannot be zero.
pub(super) fn parse_positive_duration(text: &str) -> Result<Duration, ValueError> {
    parse_duration(text).and_then(|duration| {
        if duration.is_zero() {
            Err(ValueError::Zero)
        } else {
            Ok(duration)
        }
    })
}

/// Parses `adit_flows=10`.
pub(super) fn parse_map_entries(text: &str) -> Result<(String, u32), ValueError> {
    let (map, entries) = text.split_once('=').ok_or(ValueError::MapEntries)?;
    let entries = entries.parse().map_err(|_| ValueError::MapEntries)?;
    Ok((map.to_owned(), entries))
}

/// Parses a window size: bytes, or `64KiB`, `4MiB`, `1GiB`.
///
/// HTTP/2 starts every window at 65,535 bytes and has none above 2³¹−1 (RFC 9113, 6.9.1 and 6.9.2).
pub fn parse_bytes(text: &str) -> Result<u32, ValueError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return Err(ValueError::Bytes),
    };
    let bytes = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift));
    match bytes {
        Some(bytes @ 65_535..=0x7fff_ffff) => Ok(bytes as u32),
        _ => Err(ValueError::Bytes),
    }
}

/// A pod, by namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// For which pods the kernel programs explain their decisions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BpfLog {
    /// For none.
    #[default]
    None,
    /// For every enrolled pod.
    All,
    /// For one.
    Pod(PodName),
}

impl FromStr for BpfLog {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "none" => Ok(Self::None),
            "all" => Ok(Self::All),
            _ => match text.split_once('/') {
                Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                    Ok(Self::Pod(PodName {
                        namespace: namespace.into(),
                        name: name.into(),
                    }))
                }
                _ => Err(ValueError::Pods),
            },
        }
    }
}

/// A filter of log lines that is known to be well-formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLevel(String);

impl LogLevel {
    /// The filter's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for LogLevel {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text.trim().is_empty() {
            return Err(ValueError::Filter("empty".into()));
        }
        EnvFilter::try_new(text).map_err(|error| ValueError::Filter(error.to_string()))?;
        Ok(Self(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        for (text, expected) in [
            ("500ms", Ok(Duration::from_millis(500))),
            ("10s", Ok(Duration::from_secs(10))),
            ("2m", Ok(Duration::from_secs(120))),
            ("24h", Ok(Duration::from_secs(86_400))),
            ("0s", Ok(Duration::ZERO)),
            ("10", Err(ValueError::Duration)),
            ("", Err(ValueError::Duration)),
            ("s", Err(ValueError::Duration)),
            ("-1s", Err(ValueError::Duration)),
            ("1.5s", Err(ValueError::Duration)),
            ("1 s", Err(ValueError::Duration)),
            ("1d", Err(ValueError::Duration)),
            ("99999999999999999h", Err(ValueError::Duration)),
            ("99999999999999999999s", Err(ValueError::Duration)),
            ("1µs", Err(ValueError::Duration)),
        ] {
            assert_eq!(parse_duration(text), expected, "{text}");
        }
        assert_eq!(parse_positive_duration("0s"), Err(ValueError::Zero));
    }

    #[test]
    fn sizes_are_what_http2_can_express() {
        for (text, expected) in [
            ("65535", Ok(65_535)),
            ("64KiB", Ok(65_536)),
            ("1MiB", Ok(1 << 20)),
            ("2147483647", Ok(0x7fff_ffff)),
            ("1GiB", Ok(1 << 30)),
            ("2GiB", Err(ValueError::Bytes)),
            ("1KiB", Err(ValueError::Bytes)),
            ("0", Err(ValueError::Bytes)),
            ("1MB", Err(ValueError::Bytes)),
            ("MiB", Err(ValueError::Bytes)),
            ("99999999999999999999", Err(ValueError::Bytes)),
        ] {
            assert_eq!(parse_bytes(text), expected, "{text}");
        }
    }

    #[test]
    fn pods_to_explain_are_none_all_or_one() {
        let pod = |namespace: &str, name: &str| {
            BpfLog::Pod(PodName {
                namespace: namespace.into(),
                name: name.into(),
            })
        };
        for (text, expected) in [
            ("none", Ok(BpfLog::None)),
            ("all", Ok(BpfLog::All)),
            ("shop/cart-1", Ok(pod("shop", "cart-1"))),
            ("cart-1", Err(ValueError::Pods)),
            ("/cart-1", Err(ValueError::Pods)),
            ("shop/", Err(ValueError::Pods)),
            ("a/b/c", Err(ValueError::Pods)),
        ] {
            assert_eq!(text.parse(), expected, "{text}");
        }
    }

    #[test]
    fn a_filter_that_cannot_be_parsed_is_refused() {
        assert!("info,adit::hbone=debug".parse::<LogLevel>().is_ok());
        for text in ["", "adit=loud", "a=b=c"] {
            assert!(matches!(text.parse::<LogLevel>(), Err(ValueError::Filter(_))), "{text}");
        }
    }
}
