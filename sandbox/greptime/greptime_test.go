package greptime

import (
	"database/sql"
	"net"
	"net/http"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"
)

func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

func serve(t *testing.T) (*Server, string, string) {
	t.Helper()
	mysql, web := free(t), free(t)
	s, err := Serve(mysql, web, "refit", "fake-password")
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s, mysql, web
}

func query(t *testing.T, address, password string) (string, error) {
	t.Helper()
	db, err := sql.Open("mysql", "refit:"+password+"@tcp("+address+")/public")
	require.NoError(t, err)
	defer db.Close()
	var value string
	err = db.QueryRow("SELECT 1").Scan(&value)
	return value, err
}

func TestLoginAndQuery(t *testing.T) {
	_, mysql, _ := serve(t)
	value, err := query(t, mysql, "fake-password")
	require.NoError(t, err)
	require.Equal(t, "1", value)
}

func TestWrongPasswordIsDenied(t *testing.T) {
	_, mysql, _ := serve(t)
	for _, password := range []string{"other", ""} {
		_, err := query(t, mysql, password)
		require.ErrorContains(t, err, "Access denied")
	}
}

func TestDownRefusesBothProtocols(t *testing.T) {
	s, mysql, web := serve(t)
	s.SetDown(true)
	_, err := query(t, mysql, "fake-password")
	require.Error(t, err)
	resp, err := http.Get("http://" + web + "/health")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
	s.SetDown(false)
	_, err = query(t, mysql, "fake-password")
	require.NoError(t, err)
}

func TestHealthAndSQLOverHTTP(t *testing.T) {
	_, _, web := serve(t)
	for _, path := range []string{"/health", "/v1/sql?sql=SELECT%201", "/v1/influxdb/write"} {
		resp, err := http.Get("http://" + web + path)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusOK, resp.StatusCode, path)
	}
}
