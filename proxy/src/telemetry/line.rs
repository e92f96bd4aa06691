//! One log line, logfmt or JSON, in which no value can break out of its place.

use std::fmt::{self, Display, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use time::OffsetDateTime;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// `key=value` pairs.
    #[default]
    Logfmt,
    /// One JSON object for each line.
    Json,
}

/// A log line in the making. Writes to one string and allocates nothing of its own.
#[derive(Debug)]
pub struct Record<'a> {
    line: &'a mut String,
    format: LogFormat,
}

impl<'a> Record<'a> {
    /// Begins a line with its time.
    pub fn begin(line: &'a mut String, format: LogFormat, time: SystemTime) -> Self {
        if format == LogFormat::Json {
            line.push('{');
        }
        let mut record = Self { line, format };
        record.write("time", true, &Rfc3339(time));
        record
    }

    /// What kind of line it is: a word of its own in logfmt, the `event` in JSON.
    pub fn event(&mut self, word: &'static str) {
        match self.format {
            LogFormat::Logfmt => {
                self.line.push(' ');
                self.line.push_str(word);
            }
            LogFormat::Json => self.text("event", word),
        }
    }

    /// A value that is text.
    pub fn text(&mut self, key: &str, value: &str) {
        self.value(key, &value);
    }

    /// A value that is text once it is displayed.
    pub fn value(&mut self, key: &str, value: &dyn Display) {
        self.write(key, false, value);
    }

    /// [`Record::value`], left out where there is none.
    pub fn option(&mut self, key: &str, value: Option<&dyn Display>) {
        if let Some(value) = value {
            self.value(key, value);
        }
    }

    /// A number.
    pub fn number(&mut self, key: &str, value: u64) {
        self.key(key, false);
        self.push(format_args!("{value}"));
    }

    /// A duration in milliseconds, to the microsecond.
    pub fn milliseconds(&mut self, key: &str, value: Duration) {
        self.key(key, false);
        self.push(format_args!(
            "{}.{:03}",
            value.as_millis(),
            value.subsec_micros() % 1000
        ));
    }

    /// Ends the line, with its newline.
    pub fn end(self) {
        self.line.push_str(match self.format {
            LogFormat::Logfmt => "\n",
            LogFormat::Json => "}\n",
        });
    }

    fn write(&mut self, key: &str, first: bool, value: &dyn Display) {
        self.key(key, first);
        let start = self.line.len();
        let mut escaped = Escaped {
            line: self.line,
            quote: self.format == LogFormat::Json,
        };
        // Neither the string nor any of the values displayed here fails.
        let _ = write!(escaped, "{value}");
        if escaped.quote || self.line.len() == start {
            self.line.insert(start, '"');
            self.line.push('"');
        }
    }

    fn key(&mut self, key: &str, first: bool) {
        match self.format {
            LogFormat::Logfmt => {
                if !first {
                    self.line.push(' ');
                }
                self.line.push_str(key);
                self.line.push('=');
            }
            LogFormat::Json => {
                if !first {
                    self.line.push(',');
                }
                self.line.push('"');
                self.line.push_str(key);
                self.line.push_str("\":");
            }
        }
    }

    fn push(&mut self, arguments: fmt::Arguments<'_>) {
        // Writing to a String does not fail.
        let _ = self.line.write_fmt(arguments);
    }
}

/// Escapes what it is given as a JSON string would be, and notes whether a logfmt value needs quotes.
struct Escaped<'a> {
    line: &'a mut String,
    quote: bool,
}

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // Nearly every value: printable ASCII that means nothing to either form.
        if text
            .bytes()
            .all(|b| b.is_ascii_graphic() && !matches!(b, b'"' | b'\\' | b'='))
        {
            self.line.push_str(text);
            return Ok(());
        }
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            if c == ' ' || c == '=' {
                self.quote = true;
            }
            if !must_escape(c) {
                continue;
            }
            self.quote = true;
            self.line.push_str(&text[plain..at]);
            plain = at + c.len_utf8();
            match c {
                '"' => self.line.push_str("\\\""),
                '\\' => self.line.push_str("\\\\"),
                '\n' => self.line.push_str("\\n"),
                '\r' => self.line.push_str("\\r"),
                '\t' => self.line.push_str("\\t"),
                c => write!(self.line, "\\u{:04x}", u32::from(c))?,
            }
        }
        self.line.push_str(&text[plain..]);
        Ok(())
    }
}

/// Quotes and backslashes; control characters, which drive terminals and end lines; line separators that some viewers
/// honour; and marks that change the direction of text, by which a value could be made to look like another.
fn must_escape(c: char) -> bool {
    matches!(c, '"' | '\\' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
        || c.is_control()
}

/// Displays a time as RFC 3339 in UTC, to the millisecond.
#[derive(Debug, Clone, Copy)]
pub struct Rfc3339(pub SystemTime);

impl Display for Rfc3339 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A clock before 1970 or after 9999 shows as 1970: a log line must not fail.
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(since.as_secs()).unwrap_or_default();
        let t = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let (year, month, day) = (t.year(), u8::from(t.month()), t.day());
        let (hour, minute, second) = (t.hour(), t.minute(), t.second());
        let millis = since.subsec_millis();
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(format: LogFormat, value: &str) -> String {
        let mut line = String::new();
        let mut record = Record::begin(&mut line, format, UNIX_EPOCH);
        record.text("key", value);
        record.end();
        line
    }

    #[test]
    fn a_value_is_quoted_only_where_it_must_be() {
        for (value, expected) in [
            ("plain", "plain"),
            ("spiffe://a/ns/b/sa/c", "spiffe://a/ns/b/sa/c"),
            ("[fd00::1]:80", "[fd00::1]:80"),
            ("ü", "ü"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("a=b", "\"a=b\""),
            ("say \"x\"", "\"say \\\"x\\\"\""),
            ("c:\\x", "\"c:\\\\x\""),
            ("a\nb\rc\td", "\"a\\nb\\rc\\td\""),
            ("\u{1b}[31m", "\"\\u001b[31m\""),
            ("\0\u{7f}\u{9b}", "\"\\u0000\\u007f\\u009b\""),
            ("a\u{202e}b\u{2028}c", "\"a\\u202eb\\u2028c\""),
        ] {
            assert_eq!(
                line(LogFormat::Logfmt, value),
                format!("time=1970-01-01T00:00:00.000Z key={expected}\n")
            );
        }
    }

    #[test]
    fn any_value_survives_json() {
        let mut every: String = ('\0'..'\u{300}').collect();
        every.push_str("\u{2028}\u{202e}\u{feff}𝄞");
        let line = line(LogFormat::Json, &every);
        assert_eq!(line.matches('\n').count(), 1);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["key"], every.as_str());
    }

    #[test]
    fn times_are_rfc_3339() {
        let at = |ms| Rfc3339(UNIX_EPOCH + Duration::from_millis(ms)).to_string();
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_827_696_789), "2000-02-29T12:34:56.789Z");
        assert_eq!(
            Rfc3339(UNIX_EPOCH - Duration::from_secs(1)).to_string(),
            "1970-01-01T00:00:00.000Z"
        );
    }

    #[test]
    fn durations_are_milliseconds_to_the_microsecond() {
        let mut line = String::new();
        let mut record = Record::begin(&mut line, LogFormat::Json, UNIX_EPOCH);
        record.milliseconds("duration_ms", Duration::from_micros(1_234_056));
        record.end();
        assert!(line.ends_with("\"duration_ms\":1234.056}\n"), "{line}");
    }
}
