package orders_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lapse-orders/lapse/orders"
)

// The golden files pin the contract between versions that run side by side: what an older build wrote is read for ever.
func TestExpiryIsEncodedAsTheGoldenFileSays(t *testing.T) {
	t.Parallel()
	e := orders.Expiry{
		Due:    time.Date(2026, 11, 30, 23, 0, 1, 0, time.FixedZone("CST", 8*3600)),
		Orders: []string{"1795000000000000001", "9223372036854775807", "A_b-9"},
	}
	body, err := orders.EncodeExpiry(e)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/expiry-v1.json")
	if err != nil {
		t.Fatal(err)
	}
	if want = bytes.TrimSpace(want); !bytes.Equal(body, want) {
		t.Errorf("encoded\n %s\nwant\n %s", body, want)
	}
	got, err := orders.DecodeExpiry(want)
	if err != nil {
		t.Fatal(err)
	}
	e.Due = e.Due.UTC()
	if !reflect.DeepEqual(got, e) {
		t.Errorf("decoded %+v, want %+v", got, e)
	}
}

// case DEP-1
func TestExpiryOfEveryVersionIsJudged(t *testing.T) {
	t.Parallel()
	for file, newer := range map[string]bool{"expiry-v1-more-fields.json": false, "expiry-v2.json": true, "expiry-v2-other-shape.json": true} {
		body, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		e, err := orders.DecodeExpiry(body)
		switch {
		case newer && !errors.Is(err, orders.ErrNewerVersion):
			t.Errorf("%s: %v, want a newer version", file, err)
		case newer && errors.Is(err, orders.ErrInvalid):
			t.Errorf("%s: %v; a newer version is not invalid, it is another consumer's", file, err)
		case !newer && err != nil:
			t.Errorf("%s: %v", file, err)
		case !newer && len(e.Orders) != 2:
			t.Errorf("%s: %+v", file, e)
		}
	}
}

func zipped(t *testing.T, body string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte(body)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// case MQ-12
func TestExpiryThatIsOffIsRefusedByName(t *testing.T) {
	t.Parallel()
	const good = `{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":["42"]}`
	if _, err := orders.DecodeExpiry([]byte(good)); err != nil {
		t.Fatal(err)
	}
	with := func(old, by string) string { return strings.Replace(good, old, by, 1) }
	for _, c := range []struct{ name, body, says string }{
		{"empty", "", "body is empty"},
		{"blank", " \n", "not JSON"},
		{"list", "[]", "not a JSON object"},
		{"null", "null", "not a JSON object"},
		{"text", `"x"`, "not a JSON object"},
		{"number", "1", "not a JSON object"},
		{"cut off", good[:len(good)-1], "not JSON"},
		{"byte order mark", "\xEF\xBB\xBF" + good, "byte order mark"},
		{"rubbish behind", good + "x", "follows"},
		{"second object behind", good + good, "follows"},
		{"closing brace behind", good + "}", "follows"},
		{"invalid UTF-8", with("42", "4\xff2"), "UTF-8"},
		{"a megabyte", good + strings.Repeat(" ", 1<<20), "more than 65536"},
		{"gzip", zipped(t, good), "UTF-8"},
		{"zero byte", good + "\x00", "follows"},
		{"no version", with(`"v":1,`, ""), `"v" is missing`},
		{"version in capitals", with(`"v"`, `"V"`), `"v" is missing`},
		{"version as text", with(`"v":1`, `"v":"1"`), `field "v"`},
		{"version as fraction", with(`"v":1`, `"v":1.5`), `field "v"`},
		{"version null", with(`"v":1`, `"v":null`), "v is 0"},
		{"version zero", with(`"v":1`, `"v":0`), "v is 0"},
		{"version negative", with(`"v":1`, `"v":-1`), "v is -1"},
		{"version too large for anybody", with(`"v":1`, `"v":99999999999999999999`), `field "v"`},
		{"version twice", with(`"v":1`, `"v":1,"v":2`), `"v" is there twice`},
		{"no due", with(`"due":"2026-11-30T15:00:01.000Z",`, ""), `"due" is missing`},
		{"due in seconds", with(`"2026-11-30T15:00:01.000Z"`, "1795964401"), `field "due"`},
		{"due null", with(`"2026-11-30T15:00:01.000Z"`, "null"), "due"},
		{"due without milliseconds", with("01.000Z", "01Z"), "due"},
		{"due with microseconds", with("01.000Z", "01.000000Z"), "due"},
		{"due with a comma", with("01.000Z", "01,000Z"), "due"},
		{"due in another zone", with("01.000Z", "01.000+08:00"), "due"},
		{"due on no day", with("2026-11-30", "2026-11-31"), "due"},
		{"due before 1970", with("2026-11-30", "0026-11-30"), "due"},
		{"no orders", with(`,"orders":["42"]`, ""), `"orders" is missing`},
		{"orders null", with(`["42"]`, "null"), "orders is empty"},
		{"orders empty", with(`["42"]`, "[]"), "orders is empty"},
		{"orders as text", with(`["42"]`, `"42"`), `field "orders"`},
		{"orders as object", with(`["42"]`, `{"42":1}`), `field "orders"`},
		{"id as number", with(`"42"`, "42"), `field "orders"`},
		{"id as number beyond int64", with(`"42"`, "9223372036854775808"), `field "orders"`},
		{"id as float", with(`"42"`, "1e3"), `field "orders"`},
		{"id null", with(`["42"]`, `["42",null]`), "orders[1]"},
		{"id nested", with(`"42"`, `["42"]`), `field "orders"`},
		{"id empty", with(`"42"`, `""`), "orders[0]"},
		{"id too long", with("42", strings.Repeat("9", 65)), "orders[0]"},
		{"id with a blank", with("42", " 42"), "orders[0]"},
		{"id with a point", with("42", "4.2"), "orders[0]"},
		{"id with a plus", with("42", "+42"), "orders[0]"},
		{"id with half a surrogate", with("42", `\ud800`), "orders[0]"},
		{"id in full-width digits", with("42", "４２"), "orders[0]"},
		{"nested beyond reason", `{"x":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + `}`, "not JSON"},
	} {
		_, err := orders.DecodeExpiry([]byte(c.body))
		switch {
		case err == nil:
			t.Errorf("%s: accepted", c.name)
		case !errors.Is(err, orders.ErrInvalid) || errors.Is(err, orders.ErrNewerVersion):
			t.Errorf("%s: %v is not ErrInvalid", c.name, err)
		case !strings.Contains(err.Error(), c.says):
			t.Errorf("%s: %q does not say %q", c.name, err, c.says)
		case len(err.Error()) > 400:
			t.Errorf("%s: an error of %d bytes goes into every log", c.name, len(err.Error()))
		}
	}
	// The shape of an id is the codec's, what it means the store's: these are read, and refused there.
	for _, id := range []string{"-1", "1e3", "9223372036854775808", "042", "0"} {
		if _, err := orders.DecodeExpiry([]byte(with("42", id))); err != nil {
			t.Errorf("id %q: %v", id, err)
		}
		if _, err := orders.ParseID(id); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("id %q is taken for an order of ours: %v", id, err)
		}
	}
}

func TestExpiryThatCouldNotBeReadIsNotWritten(t *testing.T) {
	t.Parallel()
	due := time.Date(2026, 11, 30, 15, 0, 1, 0, time.UTC)
	many := make([]string, 3000)
	for i := range many {
		many[i] = fmt.Sprintf("%019d", i)
	}
	for name, e := range map[string]orders.Expiry{
		"no order":         {Due: due},
		"no due":           {Orders: []string{"1"}},
		"due too far":      {Due: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), Orders: []string{"1"}},
		"half millisecond": {Due: due.Add(500 * time.Microsecond), Orders: []string{"1"}},
		"empty id":         {Due: due, Orders: []string{"1", ""}},
		"id with a quote":  {Due: due, Orders: []string{`1","2`}},
		"too many":         {Due: due, Orders: many},
	} {
		if body, err := orders.EncodeExpiry(e); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("%s: %.80s, %v", name, body, err)
		}
	}
}

func TestFiveHundredLongestIdsFitIntoOneMessage(t *testing.T) {
	t.Parallel()
	for _, longest := range []string{"9223372036854775807", strings.Repeat("Z", 64)} {
		e := orders.Expiry{Due: time.Date(2026, 11, 30, 15, 0, 1, 999e6, time.UTC)}
		for range 500 {
			e.Orders = append(e.Orders, longest)
		}
		body, err := orders.EncodeExpiry(e)
		if err != nil {
			t.Fatal(err)
		}
		got, err := orders.DecodeExpiry(body)
		if err != nil || !reflect.DeepEqual(got, e) {
			t.Errorf("500 ids of %d characters (%d bytes) do not come back: %v", len(longest), len(body), err)
		}
	}
}

// case PRD-8
func TestExpiryOfOneOrderIsSmallWhateverTheOrder(t *testing.T) {
	t.Parallel()
	body, err := orders.EncodeExpiry(orders.Expiry{Due: time.Date(2026, 11, 30, 15, 0, 1, 0, time.UTC), Orders: []string{"9223372036854775807"}})
	if err != nil || len(body) >= 1024 {
		t.Errorf("%d bytes, %v", len(body), err)
	}
}

func TestExpiryComesBackAsItWent(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := orders.Expiry{
			Due:    time.UnixMilli(rapid.Int64Range(0, 253402300799999).Draw(t, "due")).UTC(),
			Orders: rapid.SliceOfN(rapid.StringMatching(`[A-Za-z0-9_-]{1,64}`), 1, 50).Draw(t, "orders"),
		}
		body, err := orders.EncodeExpiry(e)
		if err != nil {
			t.Fatal(err)
		}
		got, err := orders.DecodeExpiry(body)
		if err != nil || !reflect.DeepEqual(got, e) {
			t.Fatalf("%+v became %+v, %v", e, got, err)
		}
	})
}

// FuzzDecodeExpiry holds that decoding never panics, names every refusal, and that what it accepts can be written and read again.
func FuzzDecodeExpiry(f *testing.F) {
	files, err := filepath.Glob("testdata/*.json")
	if err != nil || len(files) == 0 {
		f.Fatal("no seeds", err)
	}
	for _, file := range files {
		body, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	for _, seed := range []string{"", "[]", "{}", `{"v":1}`, `{"v":1,"due":"","orders":[""]}`, "\xEF\xBB\xBF{}", `{"v":1e0}`, `{"v":1,"v":1}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		e, err := orders.DecodeExpiry(body)
		if err != nil {
			if !errors.Is(err, orders.ErrInvalid) && !errors.Is(err, orders.ErrNewerVersion) {
				t.Errorf("%q: %v names no kind", body, err)
			}
			return
		}
		again, err := orders.EncodeExpiry(e)
		if err != nil {
			t.Fatalf("%q is read as %+v, which cannot be written: %v", body, e, err)
		}
		back, err := orders.DecodeExpiry(again)
		if err != nil || !reflect.DeepEqual(back, e) {
			t.Fatalf("%+v became %+v, %v", e, back, err)
		}
	})
}
