//! A CSV table with a header, read row by row, every value checked when it is read.
//!
//! [`crate::sim::trace::read`] says which columns exist and what they may contain. This module
//! finds them and says exactly what is wrong and where. It knows nothing of pods and nodes.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::io::Read;
use std::ops::RangeInclusive;
use std::str::FromStr;

use csv::{ErrorKind, StringRecord};

/// Largest file read, in bytes. The public trace has 0.7 MB per file.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Most rows read. With the ranges in [`crate::sim::trace::read`] the sum of any column, and the
/// GPU demand of all rows, stays below 2^50.
const ROWS_MAX: usize = 1_000_000;
/// Longest line read, in bytes. A file with longer ones is no table, and would only fill memory.
const LINE_BYTES_MAX: usize = 1 << 20;
/// The longest name of a pod or node in Kubernetes.
const NAME_BYTES_MAX: usize = 253;
/// Longest part of a bad value that an error repeats.
const SHOWN_CHARS_MAX: usize = 40;

/// Why a trace was not read. Lines count from 1, the header included.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be opened.
    #[error("cannot open `{file}`")]
    Open {
        /// The file as given.
        file: String,
        /// The system's error.
        source: io::Error,
    },
    /// Reading stopped in the middle: the disk failed, or the text is not UTF-8.
    #[error("cannot read `{file}`")]
    Read {
        /// The file as given.
        file: String,
        /// The CSV reader's error, with the position.
        source: csv::Error,
    },
    /// There is no row below the header.
    #[error("`{file}` holds no rows")]
    Empty {
        /// The file as given.
        file: String,
    },
    /// The file is larger than any known trace.
    #[error("`{file}` is too large: allowed are {ROWS_MAX} rows and {FILE_BYTES_MAX} bytes")]
    TooLarge {
        /// The file as given.
        file: String,
    },
    /// A column that every trace must have is not in the header.
    #[error("`{file}` has no column `{column}`")]
    MissingColumn {
        /// The file as given.
        file: String,
        /// The column looked for.
        column: &'static str,
    },
    /// A column appears twice in the header.
    #[error("`{file}` has the column `{column}` more than once")]
    RepeatedColumn {
        /// The file as given.
        file: String,
        /// The column found twice.
        column: &'static str,
    },
    /// A row has more or fewer values than the header.
    #[error("`{file}` line {line}: {found} values, expected {expected} as in the header")]
    RowLength {
        /// The file as given.
        file: String,
        /// The line.
        line: u64,
        /// Values in the header.
        expected: u64,
        /// Values in this row.
        found: u64,
    },
    /// A value is not what its column allows.
    #[error(
        "`{file}` line {line}, column `{column}`: `{value}` is not allowed, expected {allowed}"
    )]
    Value {
        /// The file as given.
        file: String,
        /// The line.
        line: u64,
        /// The column.
        column: &'static str,
        /// The value, shortened, control characters escaped.
        value: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// Two rows have the same name.
    #[error("`{file}` line {line}: the name `{name}` was already used on line {first_line}")]
    RepeatedName {
        /// The file as given.
        file: String,
        /// The second row.
        line: u64,
        /// The name.
        name: String,
        /// The first row.
        first_line: u64,
    },
}

/// Reads on until a line is too long.
struct ShortLines<R> {
    reader: R,
    line: u64,
    line_bytes: usize,
}

impl<R: Read> Read for ShortLines<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        for part in buffer[..read].split_inclusive(|byte| *byte == b'\n') {
            self.line_bytes += part.len();
            if self.line_bytes > LINE_BYTES_MAX {
                let line = self.line;
                let why = format!("line {line} is longer than {LINE_BYTES_MAX} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            if part.ends_with(b"\n") {
                self.line += 1;
                self.line_bytes = 0;
            }
        }
        Ok(read)
    }
}

/// A column that was found in the header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    title: &'static str,
    index: usize,
}

/// A CSV file whose header has been read.
pub(crate) struct Table<'f, R> {
    file: &'f str,
    reader: csv::Reader<ShortLines<io::Take<R>>>,
    header: StringRecord,
    /// Most rows read; less than [`ROWS_MAX`] in tests only.
    pub(crate) rows_max: usize,
}

impl<'f, R: Read> Table<'f, R> {
    /// Reads the header of `reader`; `file` is its name in errors.
    pub(crate) fn new(file: &'f str, reader: R) -> Result<Self, TraceError> {
        // One byte more than allowed: at the limit it shows that the file goes on.
        let limited =
            ShortLines { reader: reader.take(FILE_BYTES_MAX + 1), line: 1, line_bytes: 0 };
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(limited);
        let header = reader.headers().map_err(|error| refuse(file, error))?.clone();
        if header.is_empty() {
            return Err(TraceError::Empty { file: file.to_owned() });
        }
        Ok(Self { file, reader, header, rows_max: ROWS_MAX })
    }

    /// The column of that title, if there is one.
    pub(crate) fn find(&self, title: &'static str) -> Result<Option<Column>, TraceError> {
        let mut found = self.header.iter().enumerate().filter(|(_, cell)| *cell == title);
        let first = found.next().map(|(index, _)| Column { title, index });
        match found.next() {
            Some(_) => {
                Err(TraceError::RepeatedColumn { file: self.file.to_owned(), column: title })
            }
            None => Ok(first),
        }
    }

    /// The column of that title, or an error.
    pub(crate) fn require(&self, title: &'static str) -> Result<Column, TraceError> {
        self.find(title)?
            .ok_or(TraceError::MissingColumn { file: self.file.to_owned(), column: title })
    }

    /// Parses all rows and checks their names; an empty file is an error.
    pub(crate) fn rows<T>(
        &mut self,
        name: Column,
        parse: impl Fn(&Row<'_>) -> Result<T, TraceError>,
    ) -> Result<Vec<T>, TraceError> {
        let file = self.file;
        let mut rows = Vec::new();
        let mut first_lines = BTreeMap::new();
        let mut record = StringRecord::new();
        loop {
            let more = self.reader.read_record(&mut record);
            // First of all: a row that the limit cuts off would be called a bad one.
            if rows.len() == self.rows_max && matches!(more, Ok(true))
                || self.reader.get_ref().reader.limit() == 0
            {
                return Err(TraceError::TooLarge { file: file.to_owned() });
            }
            if !more.map_err(|error| refuse(file, error))? {
                break;
            }
            let line = record.position().map_or(0, csv::Position::line);
            let row = Row { file, line, record: &record };
            row.check_name(name)?;
            if let Some(first_line) = first_lines.insert(row.text(name).to_owned(), line) {
                let name = row.text(name).to_owned();
                return Err(TraceError::RepeatedName {
                    file: file.to_owned(),
                    line,
                    name,
                    first_line,
                });
            }
            rows.push(parse(&row)?);
        }
        if rows.is_empty() {
            return Err(TraceError::Empty { file: file.to_owned() });
        }
        Ok(rows)
    }
}

fn refuse(file: &str, error: csv::Error) -> TraceError {
    let file = file.to_owned();
    match error.kind() {
        ErrorKind::UnequalLengths { pos, expected_len, len } => TraceError::RowLength {
            file,
            line: pos.as_ref().map_or(0, csv::Position::line),
            expected: *expected_len,
            found: *len,
        },
        _ => TraceError::Read { file, source: error },
    }
}

/// One row and its position.
pub(crate) struct Row<'r> {
    file: &'r str,
    line: u64,
    record: &'r StringRecord,
}

impl Row<'_> {
    /// The value without the blanks around it.
    pub(crate) fn text(&self, column: Column) -> &str {
        self.record.get(column.index).unwrap_or_default()
    }

    /// A whole number in `range`, written in digits only.
    pub(crate) fn number<T>(
        &self,
        column: Column,
        range: RangeInclusive<T>,
    ) -> Result<T, TraceError>
    where
        T: FromStr + PartialOrd + Display,
    {
        // Digits only: `parse` alone would accept a leading plus.
        let text = self.text(column);
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse() {
            Ok(value) if digits && range.contains(&value) => Ok(value),
            _ if range.start() == range.end() => self.refuse(column, range.start()),
            _ => self.refuse(
                column,
                format!("a whole number from {} to {}", range.start(), range.end()),
            ),
        }
    }

    /// A number, or nothing.
    pub(crate) fn number_if_any<T>(
        &self,
        column: Column,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, TraceError>
    where
        T: FromStr + PartialOrd + Display,
    {
        match self.text(column) {
            "" => Ok(None),
            _ => self.number(column, range).map(Some),
        }
    }

    fn check_name(&self, column: Column) -> Result<(), TraceError> {
        let name = self.text(column);
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        match name.len() {
            1..=NAME_BYTES_MAX if name.bytes().all(legal) => Ok(()),
            _ => self.refuse(
                column,
                format!("1 to {NAME_BYTES_MAX} ASCII letters, digits, `-`, `.` or `_`"),
            ),
        }
    }

    /// The model name in this column; may be empty.
    pub(crate) fn model(&self, column: Column) -> Result<String, TraceError> {
        self.check_model(column, self.text(column))
    }

    pub(crate) fn check_model(&self, column: Column, text: &str) -> Result<String, TraceError> {
        let legal = |c: char| !c.is_control() && c != '|';
        match text.len() {
            0..=NAME_BYTES_MAX if text.chars().all(legal) => Ok(text.to_owned()),
            _ => self.refuse(
                column,
                format!("at most {NAME_BYTES_MAX} bytes without `|` or control characters"),
            ),
        }
    }

    /// Model names separated by `|`; none if the value is empty.
    pub(crate) fn models(&self, column: Column) -> Result<Vec<String>, TraceError> {
        let text = self.text(column);
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let models = text.split('|').map(|model| match model.trim() {
            "" => self.refuse(column, "GPU models separated by `|`"),
            model => self.check_model(column, model),
        });
        models.collect()
    }

    /// The error of a value, with what its column allows.
    pub(crate) fn refuse<T>(&self, column: Column, allowed: impl Display) -> Result<T, TraceError> {
        let shown = self.text(column).chars().take(SHOWN_CHARS_MAX);
        Err(TraceError::Value {
            file: self.file.to_owned(),
            line: self.line,
            column: column.title,
            value: shown.flat_map(char::escape_debug).collect(),
            allowed: allowed.to_string(),
        })
    }
}
