package orders

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"

	"github.com/go-sql-driver/mysql"
)

// Error numbers are stable across MySQL and MariaDB, texts are not: only numbers are compared.
const (
	errDuplicateKey  = 1062
	errLockWait      = 1205
	errDeadlock      = 1213
	errRecordChanged = 1020 // MariaDB: the row changed since the snapshot was taken
	errNoSavepoint   = 1305
	errNoSuchTable   = 1146
	errTableRights   = 1142
)

func number(err error) uint16 {
	var my *mysql.MySQLError
	if errors.As(err, &my) {
		return my.Number
	}
	return 0
}

// IsRetryable reports whether an error of a …Tx function means that the caller should roll back its transaction and run it again
// from the start: a deadlock (1213), a lock wait that was cut off (1205), or a row that changed under MariaDB's snapshot (1020).
// After 1213 the transaction is already gone in the server: a statement that followed would be committed on its own.
func IsRetryable(err error) bool {
	switch number(err) {
	case errDeadlock, errLockWait, errRecordChanged:
		return true
	}
	return errors.Is(err, errAgain)
}

// notOurs are the server's errors that say nothing about the rows at hand: the same statement with other rows would fail too.
// By number: full disk and memory (1021, 1037, 1038, 1041, 1114, 3675), too many connections (1040, 1203, 1226), rights and schema
// (1044, 1045, 1049, 1054, 1142, 1143, 1146, 1227, 1370), shutdown and killed queries (1053, 1077, 1079, 1080, 1159, 1160, 1161,
// 1317, 1927, 3024, 3169), read-only (1290, 1792, 1836), commit that failed in the storage (1180), log full (1598, 1197), packet
// too large (1153), and the retryable ones.
var notOurs = map[uint16]bool{
	1020: true, 1205: true, 1213: true,
	1021: true, 1037: true, 1038: true, 1041: true, 1114: true, 3675: true,
	1040: true, 1203: true, 1226: true,
	1044: true, 1045: true, 1049: true, 1054: true, 1142: true, 1143: true, 1146: true, 1227: true, 1370: true,
	1053: true, 1077: true, 1079: true, 1080: true, 1153: true, 1159: true, 1160: true, 1161: true, 1180: true, 1197: true, 1317: true, 1598: true,
	1927: true, 3024: true, 3169: true,
	1290: true, 1792: true, 1836: true,
}

// IsUnavailable reports whether err says that the database, not an order, is the trouble: unreachable, shutting down, read-only, out
// of connections or space, without rights or schema, or too slow for the context. Whoever works on orders pauses then and asks again;
// halving a batch or parking an order is for other errors only. Safe for nil (false).
func IsUnavailable(err error) bool {
	if err == nil {
		return false
	}
	if n := number(err); n != 0 {
		return notOurs[n]
	}
	var netErr net.Error
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, mysql.ErrInvalidConn) || errors.Is(err, sql.ErrConnDone) ||
		errors.Is(err, sql.ErrTxDone) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || errors.As(err, &netErr) ||
		errors.Is(err, errNotReady) || errors.Is(err, errAgain)
}
