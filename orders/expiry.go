// The expiry is the contract between relay and consumer, and between versions of lapse that run side by side, so its encoding is
// strict: what is off in any way is an error that names it, never a guess. Unknown fields are ignored, which leaves room for additions
// that older consumers may miss.

package orders

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"
	"unicode/utf8"
)

const (
	// ExpiryVersion is the version that this build writes and the newest that it reads.
	ExpiryVersion = 1
	// MaxExpiryBody is the most bytes of an expiry. Near the broker's own maximum of 4 MiB its timer stops enqueuing for good
	// (apache/rocketmq#7641, #9654).
	MaxExpiryBody = 64 << 10
	// maxOrderIDText is the longest id that an expiry may carry; the ids of other stores than ours are texts.
	maxOrderIDText = 64
)

// Expiry is the content of a timed message: the orders that fall due at one instant. Orders are ids as text; what they mean is the
// store's to say.
type Expiry struct {
	Due    time.Time
	Orders []string
}

// ErrNewerVersion is in the chain of the error of [DecodeExpiry] for a body of a later version: it belongs to a newer consumer of the
// group, which has to be able to take it.
var ErrNewerVersion = errors.New("expiry of a newer version")

const expiryLayout = "2006-01-02T15:04:05.000Z"

// EncodeExpiry gives the body of a timed message. It refuses what DecodeExpiry would: no order, ids of a wrong shape, more than 64 KiB.
func EncodeExpiry(e Expiry) ([]byte, error) {
	if len(e.Orders) == 0 {
		return nil, invalid("encode expiry: no order in it")
	}
	due := e.Due.UTC()
	if year := due.Year(); year < 1970 || year > 9999 {
		return nil, invalid("encode expiry: due %s is out of range", due)
	}
	if !due.Equal(due.Truncate(time.Millisecond)) {
		return nil, invalid("encode expiry: due %s is not a whole number of milliseconds", due.Format(time.RFC3339Nano))
	}
	b := make([]byte, 0, 64+23*len(e.Orders))
	b = append(b, `{"v":`...)
	b = strconv.AppendInt(b, ExpiryVersion, 10)
	b = append(b, `,"due":"`...)
	b = due.AppendFormat(b, expiryLayout)
	b = append(b, `","orders":[`...)
	for i, id := range e.Orders {
		if err := checkOrderIDText(id); err != nil {
			return nil, fmt.Errorf("encode expiry: orders[%d]: %w", i, err)
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '"')
		b = append(b, id...)
		b = append(b, '"')
	}
	b = append(b, `]}`...)
	if len(b) > MaxExpiryBody {
		return nil, invalid("encode expiry: %d orders make %d bytes, more than %d", len(e.Orders), len(b), MaxExpiryBody)
	}
	return b, nil
}

// DecodeExpiry reads the body of a timed message. The version is judged first and from the body alone: [ErrNewerVersion] for a later
// one, whatever else is in it. Every other error says what is off and where.
func DecodeExpiry(body []byte) (Expiry, error) {
	fields, err := topFields(body)
	if err != nil {
		return Expiry{}, fmt.Errorf("decode expiry: %w", err)
	}
	var version int
	if err := need(fields, "v", &version); err != nil {
		return Expiry{}, fmt.Errorf("decode expiry: %w", err)
	}
	switch {
	case version > ExpiryVersion:
		return Expiry{}, fmt.Errorf("decode expiry: v is %d and this build reads up to %d: %w", version, ExpiryVersion, ErrNewerVersion)
	case version < 1:
		return Expiry{}, invalid("decode expiry: v is %d", version)
	}
	var e Expiry
	var due string
	if err := need(fields, "due", &due); err != nil {
		return Expiry{}, fmt.Errorf("decode expiry: %w", err)
	}
	if e.Due, err = time.Parse(expiryLayout, due); err != nil || e.Due.Format(expiryLayout) != due || e.Due.Year() < 1970 {
		return Expiry{}, invalid("decode expiry: due %q is not of the form %s", clip(due, 64), expiryLayout)
	}
	// A JSON null would leave the list nil and the ids empty; both are caught below.
	if err := need(fields, "orders", &e.Orders); err != nil {
		return Expiry{}, fmt.Errorf("decode expiry: %w", err)
	}
	if len(e.Orders) == 0 {
		return Expiry{}, invalid("decode expiry: orders is empty")
	}
	for i, id := range e.Orders {
		if err := checkOrderIDText(id); err != nil {
			return Expiry{}, fmt.Errorf("decode expiry: orders[%d]: %w", i, err)
		}
	}
	return e, nil
}

// topFields gives the fields of the one JSON object that body has to be. encoding/json alone would match names in any case, take the
// last of two equal ones, and replace invalid UTF-8 in silence.
func topFields(body []byte) (map[string]json.RawMessage, error) {
	switch {
	case len(body) == 0:
		return nil, invalid("the body is empty")
	case len(body) > MaxExpiryBody:
		return nil, invalid("the body has %d bytes, more than %d", len(body), MaxExpiryBody)
	case bytes.HasPrefix(body, []byte("\xEF\xBB\xBF")):
		return nil, invalid("the body begins with a byte order mark")
	case !utf8.Valid(body):
		return nil, invalid("the body is not valid UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	first, err := dec.Token()
	if err != nil {
		return nil, invalid("the body is not JSON: %v", err)
	}
	if first != json.Delim('{') {
		return nil, invalid("the body is not a JSON object")
	}
	fields := map[string]json.RawMessage{}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, invalid("the body is not JSON: %v", err)
		}
		name, _ := key.(string) // the decoder gives nothing else at the place of a name
		if _, twice := fields[name]; twice {
			return nil, invalid("field %q is there twice", clip(name, 64))
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, invalid("the body is not JSON: %v", err)
		}
		fields[name] = value
	}
	if _, err := dec.Token(); err != nil {
		return nil, invalid("the body is not JSON: %v", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, invalid("something follows the JSON object")
	}
	return fields, nil
}

func need(fields map[string]json.RawMessage, name string, into any) error {
	raw, ok := fields[name]
	if !ok {
		return invalid("field %q is missing", name)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return invalid("field %q: %v", name, err)
	}
	return nil
}

func checkOrderIDText(id string) error {
	if id == "" || len(id) > maxOrderIDText {
		return invalid("id %q does not have 1 to %d characters", clip(id, maxOrderIDText), maxOrderIDText)
	}
	for i := range len(id) {
		c := id[i]
		ok := c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c == '-'
		if !ok {
			return invalid("id %q has a character outside A-Z a-z 0-9 _ -", id)
		}
	}
	return nil
}
